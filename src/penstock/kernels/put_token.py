"""PutToken: one decoded token of every row to its place in a window."""

from torch import Tensor

from penstock.kernels.native.compiled import kernel


class PutToken:
    """Writes tokens into a window whose memory stays where it is."""

    def __init__(self, tokens: Tensor, mask: Tensor) -> None:
        """Look at the window.

        Args:
            tokens: keys and values side by side. [batch, places, 2, kv_heads, head_dim]
            mask: additive. [batch, places]
        """
        self._tokens, self._mask, self._dtype = tokens, mask, tokens.dtype
        kv_heads, head_dim = tokens.shape[3:]
        width = kv_heads * head_dim
        self._shape = (len(tokens), kv_heads, 1, head_dim)
        lies_so = tokens.stride()[1:] == (2 * width, width, head_dim, 1) and mask.stride(1) == 1
        here = tokens.device.type == "cpu"
        self._kernel = kernel("put_token") if lies_so and here else None
        self._part_bytes = width * tokens.itemsize
        self._token_address, self._mask_address = tokens.data_ptr(), mask.data_ptr()
        self._token_stride = tokens.stride(0) * tokens.itemsize
        self._mask_stride, self._mask_bytes = mask.stride(0) * mask.itemsize, mask.itemsize

    def __call__(self, keys: Tensor, values: Tensor, place: int) -> None:
        """Write keys and values to a place and show it; the compiled form of `twin`.

        Args:
            keys, values: where the window is. [batch, kv_heads, 1, head_dim]
            place: of the token, in every row.
        """
        if (
            self._kernel is None
            or not keys.dtype == values.dtype == self._dtype
            or not (keys.is_contiguous() and values.is_contiguous())
            or not keys.shape == values.shape == self._shape
            or not 0 <= place < self._tokens.shape[1]
        ):
            self.twin(keys, values, place)
            return
        self._kernel(
            keys.data_ptr(), values.data_ptr(), keys.shape[0], self._part_bytes,
            self._token_address + 2 * place * self._part_bytes, self._token_stride,
            self._mask_address + place * self._mask_bytes, self._mask_stride, self._mask_bytes,
        )  # fmt: skip

    def twin(self, keys: Tensor, values: Tensor, place: int) -> None:
        """The meaning of a call in torch."""
        self._tokens[:, place, 0] = keys[:, :, 0]
        self._tokens[:, place, 1] = values[:, :, 0]
        self._mask[:, place] = 0.0
