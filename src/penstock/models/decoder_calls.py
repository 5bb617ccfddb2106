"""DecoderCalls: what the text decoder of a model that sees is called with is its cache's to say."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.models.cache_argument import cache_name_in
from penstock.models.query_projection import decoder_name
from penstock.models.row_positions import RowPositions
from penstock.models.shared_part import SharedPart, Undo

GivenInputs: TypeAlias = Mapping[str, Any]
"""Arguments of a decoder's `forward`."""


def sees(model: PreTrainedModel) -> bool:
    """Whether a model takes pictures: its decoder gets embeddings that other parts have made."""
    return getattr(model.config, "vision_config", None) is not None


def has_axes(model: PreTrainedModel) -> bool:
    """Whether tokens of pictures have positions on several axes (M-RoPE)."""
    return any("rope_deltas" in vars(module) for module in model.modules())


class DecoderCalls:
    """A cache's word in the calls of its model's text decoder.

    Positions follow what the cache's rows hold, where the model keeps what they depend on on itself
    (`rope_deltas`). A prompt's embeddings are given to it chunk by chunk. A model has one hook for
    all of its caches: it asks the cache of the call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Put the hook on the decoder.

        Raises:
            UnsupportedModelError: the decoder cannot be found.
        """
        decoder = model.get_submodule(decoder_name(model))

        def put() -> Undo:
            handle = decoder.register_forward_pre_hook(_before_decoder, with_kwargs=True)

            def undo() -> None:
                handle.remove()

            return undo

        self.positions = RowPositions()
        """Where the tokens of each row stand."""
        self.config = model.config
        self.has_axes = has_axes(model)
        """Whether that is to be said to the model, and does not follow from their places."""
        self._given: GivenInputs | None = None
        self._part = SharedPart(model, "decoder", put)

    def remove(self) -> None:
        """Leave the decoder to the model's other caches; the last one takes the hook off."""
        self._part.leave()

    def before(self, cache: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the decoder is called with in place of `kwargs`.

        Raises:
            CacheStateError: the cache ends within a picture.
        """
        if self._given is not None:
            return {**kwargs, **self._given}
        if not self.has_axes:
            return kwargs
        mask, embedded = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
        tokens = kwargs["input_ids"] if embedded is None else embedded
        positions = self.positions.of_step(
            cache.get_seq_length(),
            (tokens.shape[0], tokens.shape[1]),
            kwargs.get("position_ids"),
            mask if isinstance(mask, Tensor) else None,
        )
        return {**kwargs, "position_ids": positions.to(tokens.device)}

    @contextmanager
    def given(self, inputs: GivenInputs) -> Iterator[None]:
        """For `with`: what the decoder takes in the call inside, whatever the model has made."""
        self._given = inputs
        try:
            yield
        finally:
            self._given = None


def _before_decoder(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Ask the cache that this call brings.

    Args:
        kwargs: None in a call that runs while the hook is put on or taken off in another thread;
            that call is not one of ours.
    """
    if kwargs is None:
        return None
    cache = kwargs.get(cache_name_in(kwargs))
    calls = getattr(cache, "decoder_calls", None)
    return None if calls is None else (args, calls.before(cache, kwargs))
