"""PredictedQuery: norm, 8-bit projection, norm per head and rotary embedding in one call."""

import ctypes

import torch
from torch import Tensor

from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.native.compiled import kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES
from penstock.kernels.query_steps import rms_norm, turn_query


class _Projection(ctypes.Structure):
    """`penstock_projection` of native/steps.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "weight", "scale", "bias", "query_norm")),
        *((name, ctypes.c_double) for name in ("epsilon", "query_epsilon")),
        *((name, ctypes.c_int64) for name in ("width", "heads", "dim", "kind")),
    )


class PredictedQuery:
    """The steps from a hidden state to a query with a layer's weights at hand.

    The same as `rms_norm`, an `Int8Linear` and `turn_query` one after the other. Together they take
    a third of the time in a decode step, where between two layers the weights have swept the caches
    and each call fetches its code again.
    """

    def __init__(
        self,
        norm: Tensor,
        epsilon: float,
        linear: Int8Linear,
        head_dim: int,
        query_norm: Tensor | None,
        query_epsilon: float,
    ) -> None:
        """Take a layer's weights; later changes of the model are not seen, as by the 8-bit copy.

        Args:
            norm: of the layer's input. [width]
            query_norm: of each head, where the model has one. [head_dim]
        """
        self._norm, self._epsilon, self._linear = norm.detach(), epsilon, linear
        self._query_norm = None if query_norm is None else query_norm.detach()
        self._query_epsilon = query_epsilon
        self._head_dim = head_dim
        outputs, width = linear.weight.shape
        self._heads, self._width = outputs // head_dim, width
        self._kernel = kernel("predict_query") if self._fits() else None
        if self._kernel is None:
            return
        self._layer = _Projection(
            norm=norm.data_ptr(), weight=linear.weight.data_ptr(), scale=linear.scale.data_ptr(),
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            query_norm=None if query_norm is None else query_norm.data_ptr(),
            epsilon=epsilon, query_epsilon=query_epsilon,
            width=width, heads=self._heads, dim=head_dim, kind=DTYPE_CODES[norm.dtype],
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)

    def _fits(self) -> bool:
        weights = [self._norm] if self._query_norm is None else [self._norm, self._query_norm]
        return self._head_dim % 32 == 0 and self._width % 64 == 0 and all(
            weight.dtype in DTYPE_CODES and weight.dtype == self._norm.dtype
            and weight.device.type == "cpu" and weight.is_contiguous()
            for weight in weights
        ) and self._belong()  # fmt: skip

    def _belong(self) -> bool:
        """Whether each weight is as long as the kernel takes it for; torch broadcasts others."""
        linear, outputs = self._linear, self._heads * self._head_dim
        return (
            self._norm.shape == (self._width,) and len(linear.weight) == outputs
            and linear.scale.shape == (outputs,)
            and (linear.bias is None or linear.bias.shape == (outputs,))
            and (self._query_norm is None or self._query_norm.shape == (self._head_dim,))
        )  # fmt: skip

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The query; the compiled form of `twin`.

        Args:
            hidden: input of the decoder layer, few rows. [batch, 1, width]
            cos, sin: of the query's position. [batch or 1, 1, head_dim]

        Returns:
            Post-RoPE. [batch, heads, head_dim]
        """
        batch, dtype = hidden.shape[0], self._norm.dtype
        dim = self._head_dim
        if (
            self._kernel is None
            or not hidden.dtype == cos.dtype == sin.dtype == dtype
            or hidden.shape[1:] != (1, self._width)
            or not cos.shape[-1] == sin.shape[-1] == dim
        ):
            return self.twin(hidden, cos, sin)
        if len(cos) != batch:
            cos, sin = cos.expand(batch, 1, dim), sin.expand(batch, 1, dim)
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        scratch = torch.empty(8 * batch * (self._width + self._heads * dim), dtype=torch.uint8)
        out = torch.empty(batch, self._heads, dim, dtype=dtype)
        self._kernel(
            self._address, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch,
            scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def twin(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The meaning of a call: one step after the other."""
        query = self._linear(rms_norm(hidden, self._norm, self._epsilon))
        query = query.view(len(hidden), self._heads, self._head_dim)
        return turn_query(query, cos[:, -1], sin[:, -1], self._query_norm, self._query_epsilon)
