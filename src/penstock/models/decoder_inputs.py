"""What a model makes of a prompt with pictures for its text decoder, to be read chunk by chunk."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import PromptError, UnsupportedModelError
from penstock.models.attention_adapter import LazyMask
from penstock.models.cache_argument import CACHE_NAMES, cache_argument
from penstock.models.decoder_calls import GivenInputs
from penstock.models.load_errors import said_of
from penstock.models.model_shape import FULL
from penstock.models.row_positions import Block, blocks_of

_KNOWN = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks",
          "deepstack_visual_embeds", "cache_position", *CACHE_NAMES}  # fmt: skip
_FAULTS = (TypeError, AttributeError, ValueError, LookupError, RuntimeError)
"""What a model raises where tokens and pictures do not fit together."""


class _Seen(Exception):
    """Ends the forward pass where the text decoder begins."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


class _SeeingCache(DynamicCache):  # type: ignore[misc]
    """An empty cache; what the decoder would be called with is only looked at."""

    @property
    def decoder_calls(self) -> "_SeeingCache":
        """Asked by the hook on the decoder."""
        return self

    def before(self, cache: object, kwargs: dict[str, Any]) -> dict[str, Any]:
        """As `DecoderCalls.before`; ends the call."""
        del cache
        raise _Seen(kwargs)


class RowInputs(NamedTuple):
    """What the decoder gets of one row."""

    embeds: Tensor
    """[tokens, hidden_size]"""
    axes: Tensor | None
    """Positions on each axis, in host memory; None where the places are the positions. int64
    [axes, tokens]"""
    next_text: int
    """Position of a token of text behind them."""
    is_visual: Tensor | None
    """Tokens to which later layers add, in host memory. bool [tokens]"""
    deep: tuple[Tensor, ...]
    """What the first layers add at those tokens (DeepStack, arXiv 2406.04334), layer by layer.
    [visual tokens, hidden_size]"""


@torch.no_grad()
def row_inputs(model: PreTrainedModel, ids: Tensor, visuals: Mapping[str, Tensor]) -> RowInputs:
    """Run a model with the tokens of one row as far as its text decoder.

    The model's own code embeds text and pictures, and gives positions. A cache must be open on it,
    as that brings the hook which stops it there (`DecoderHook`).

    Args:
        ids: int64 [tokens]
        visuals: the processor's tensors of all pictures in them; entries of a token's own are
            int64 [1, tokens].

    Raises:
        PromptError: tokens and pictures do not fit together.
        UnsupportedModelError: the decoder gets something that cannot be cut into chunks; says why.
    """
    count, device = len(ids), model.get_input_embeddings().weight.device
    # One more token of text shows the position behind a picture at the end.
    longer = torch.cat([ids, ids.new_full((1,), _plain_token(model, ids))])[None]
    given = {
        name: torch.cat([each, each.new_zeros(1, 1)], dim=1)
        if tuple(each.shape) == (1, count) and not each.is_floating_point() else each
        for name, each in visuals.items()
    }  # fmt: skip
    given = {name: each.to(device) for name, each in given.items()}
    called: Any = model
    try:
        called(
            input_ids=longer.to(device),
            **given,
            use_cache=True,
            **cache_argument(model, _SeeingCache(config=model.config)),
        )
    except _Seen as seen:
        # Without pictures, positions may be of the newest prompt's difference.
        return _inputs(type(model).__name__, seen.kwargs, count, with_axes=bool(visuals))
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as fault:
        raise PromptError(
            f"{type(model).__name__} cannot take this prompt's pictures: {said_of(fault)}"
        ) from fault
    raise UnsupportedModelError(f"{type(model).__name__} never called its text decoder")


def _plain_token(model: PreTrainedModel, ids: Tensor) -> int:
    """A token that stands for no picture: the least that no field of the configuration names."""
    config: Any = model.config
    named = {value for name, value in vars(config).items() if name.endswith("_token_id")}
    named |= {
        getattr(config, "image_token_index", None),
        getattr(config, "video_token_index", None),
    }
    return next(token for token in range(len(named) + 1) if token not in named)


def _inputs(name: str, kwargs: dict[str, Any], count: int, *, with_axes: bool) -> RowInputs:
    for key, value in kwargs.items():
        if key not in _KNOWN and (isinstance(value, Tensor) or _is_tensors(value)):
            raise UnsupportedModelError(
                f"{name} gives its decoder {key} beside embeddings, which cannot be cut into "
                "chunks; use this model without pictures"
            )
    mask = kwargs.get("attention_mask")
    mask = mask.get(FULL) if isinstance(mask, Mapping) else mask
    if isinstance(mask, LazyMask):
        _ = mask.padding  # refuses pictures that see in both directions
    positions: Tensor | None = kwargs.get("position_ids")
    axes = None
    if with_axes and positions is not None and positions.dim() == 3 and positions.shape[0] >= 3:
        axes = positions[-3:, 0].cpu()
    visual, deep = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    return RowInputs(
        embeds=kwargs["inputs_embeds"][0, :count],
        axes=None if axes is None else axes[:, :count],
        next_text=count if axes is None else int(axes[0, count]),
        is_visual=None if visual is None else visual[0, :count].cpu(),
        deep=() if deep is None else tuple(deep),
    )


def _is_tensors(value: object) -> bool:
    return isinstance(value, Sequence) and any(isinstance(each, Tensor) for each in value)


class BatchInputs:
    """The inputs of a batch's rows, of which each is padded on the left, a chunk at a time."""

    def __init__(self, rows: Sequence[RowInputs], cache: Any) -> None:
        """Have them go on from what a cache holds, and the cache know where they stand.

        Args:
            rows: what each row has that the cache does not hold yet.
            cache: a `TieredCache` of a model that sees.

        Raises:
            CacheStateError: it ends within a picture.
        """
        held, positions = cache.get_seq_length(), cache.decoder_calls.positions
        longest = max(len(row.embeds) for row in rows)
        self._rows = rows
        self._starts = [held + longest - len(row.embeds) for row in rows]
        """Place of each row's first token."""
        positions.require_rows(len(rows), held)
        known = []
        self._begins: list[int] = []
        """Position of each row's first token."""
        for number, (row, start) in enumerate(zip(rows, self._starts, strict=True)):
            blocks = positions.blocks(number, held)
            if start > held:
                blocks.append(Block(held, start, 0))
            self._begins.append(0 if start > held else positions.next_at(number, held))
            if cache.decoder_calls.has_axes:
                text = self._begins[-1]
                axes = torch.cat([_axes(row), torch.full((3, 1), row.next_text)], dim=1)
                blocks += blocks_of(axes + text, start=start, text=text)
            known.append(blocks)
        self._has_axes = cache.decoder_calls.has_axes
        positions.hold(known)

    def chunk(self, begin: int, end: int) -> GivenInputs:
        """What the decoder gets of the places from `begin` to `end`."""
        parts = [
            (row, max(0, begin - start), max(0, end - start))
            for row, start in zip(self._rows, self._starts, strict=True)
        ]
        like, size = self._rows[0].embeds, end - begin
        embeds = like.new_zeros(len(parts), size, like.shape[-1])
        for number, (row, first, last) in enumerate(parts):
            embeds[number, size - (last - first) :] = row.embeds[first:last]
        given: dict[str, Any] = {"input_ids": None, "inputs_embeds": embeds}
        if self._has_axes:
            axes = torch.zeros(3, len(parts), size, dtype=torch.int64)
            for number, (row, first, last) in enumerate(parts):
                own = _axes(row)[:, first:last] + self._begins[number]
                axes[:, number, size - (last - first) :] = own
            given["position_ids"] = axes.to(embeds.device)
        return given | self._deep(parts, size, embeds.device)

    def _deep(
        self, parts: Sequence[tuple[RowInputs, int, int]], size: int, device: torch.device
    ) -> dict[str, Any]:
        """What is added at the chunk's visual tokens, which come row by row."""
        shown = torch.zeros(len(parts), size, dtype=torch.bool)
        found: list[tuple[Tensor, ...]] = []
        for number, (row, first, last) in enumerate(parts):
            if row.is_visual is None:
                continue
            shown[number, size - (last - first) :] = row.is_visual[first:last]
            before, count = int(row.is_visual[:first].sum()), int(row.is_visual[first:last].sum())
            if count:
                found.append(tuple(each[before : before + count] for each in row.deep))
        if not found:
            return {}
        return {
            "visual_pos_masks": shown.to(device),
            "deepstack_visual_embeds": [torch.cat(each) for each in zip(*found, strict=True)],
        }


def _axes(row: RowInputs) -> Tensor:
    """Positions of a row's tokens, the places where nothing else was said. int64 [3, tokens]"""
    return torch.arange(len(row.embeds)).expand(3, -1) if row.axes is None else row.axes
