"""How the compiled kernels call the dtypes of a model (`enum kind` in avx512.h)."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)
