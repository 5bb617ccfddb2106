"""host_view(): pinned host memory as a tensor of the device, without a copy."""

import torch
from torch import Tensor


class _Mapped:
    """Bytes of a pinned host tensor as the CUDA array interface describes them."""

    def __init__(self, host_bytes: Tensor) -> None:
        self.host_bytes = host_bytes
        self.__cuda_array_interface__ = {
            "shape": tuple(host_bytes.shape),
            "strides": tuple(host_bytes.stride()),
            "typestr": "|u1",
            "data": (host_bytes.data_ptr(), False),
            "version": 3,
        }


def host_view(host: Tensor, device: torch.device) -> Tensor:
    """The same memory, addressed from `device`; only the torch twins need it.

    Kernels in Triton take the address of pinned memory as it is (unified addressing), but torch
    asks every operand of an operation to be on one device.

    Args:
        host: any shape and dtype, contiguous in its last dimension; pinned if `device` is CUDA.
    """
    if host.device == device or device.type != "cuda":
        return host
    return torch.as_tensor(_Mapped(host.view(torch.uint8)), device=device).view(host.dtype)
