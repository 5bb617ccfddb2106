"""What every test needs before the first module is imported."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels in Triton run in its interpreter. It must be told before anything imports Triton,
    # which transformers does, so that this stands above the tests of the kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Collections look only at what a module's tests made, not at all of torch and transformers.

    Benchmarks collect before each figure of memory; what lives already is no test's garbage.
    """
    gc.collect()
    gc.freeze()
