"""Int8Linear: a linear layer's weights in 8 bits, for a few rows at a time."""

import torch
from torch import Tensor

from penstock.kernels.native.compiled import kernel


class Int8Linear:
    """Half the bytes of a 16-bit layer, and so half the time where memory is what it waits for.

    One scale per output, symmetric, rounded to the nearest: an error of at most 1/254 of an
    output's largest weight in each product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy a layer's weights.

        Args:
            weight: [outputs, width]
            bias: [outputs]

        Attributes:
            weight: int8 [outputs, width]
            scale: of each output, float32 [outputs]
            bias: float32 [outputs], or None
        """
        wide = weight.detach().float()
        self.scale = wide.abs().amax(dim=1).clamp_min(1e-30).div_(127.0)
        self.weight = (wide / self.scale[:, None]).round_().to(torch.int8).contiguous()
        self.bias = None if bias is None else bias.detach().float()

    @staticmethod
    def num_bytes(weight: Tensor, bias: Tensor | None) -> int:
        """Bytes of a layer's copy, for the ledger."""
        return weight.numel() + 4 * weight.shape[0] * (1 if bias is None else 2)

    @staticmethod
    def is_fast(weight: Tensor) -> bool:
        """Whether a compiled kernel serves these weights; without one the copy is not worth it."""
        fits = weight.device.type == "cpu" and weight.shape[1] % 64 == 0
        return fits and weight.dtype.itemsize > 1 and kernel("int8_linear") is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias; the compiled form of `twin`.

        Args:
            x: [..., width], few rows.

        Returns:
            [..., outputs] in the dtype of `x`.
        """
        compiled = kernel("int8_linear")
        if compiled is None or x.device.type != "cpu" or not self._takes(x.shape[-1]):
            return self.twin(x)
        width, outputs = x.shape[-1], self.weight.shape[0]
        wide = x.reshape(-1, width).float().contiguous()
        out = torch.empty(len(wide), outputs)
        compiled(
            wide.data_ptr(), self.weight.data_ptr(), self.scale.data_ptr(), len(wide), width,
            outputs, out.data_ptr(),
        )  # fmt: skip
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], outputs).to(x.dtype)

    def _takes(self, width: int) -> bool:
        return width % 64 == 0 and width == self.weight.shape[1]

    def twin(self, x: Tensor) -> Tensor:
        """The meaning of a call in plain torch."""
        weight = self.weight.float() * self.scale[:, None]
        return torch.nn.functional.linear(x.float(), weight, self.bias).to(x.dtype)
