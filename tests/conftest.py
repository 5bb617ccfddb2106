"""What every test needs before the first module is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Kernels in Triton run in its interpreter. It must be told before anything imports Triton,
    # which transformers does, so that this stands above the tests of the kernels.
    os.environ["TRITON_INTERPRET"] = "1"
