"""prefill(): prompts read into a cache chunk by chunk; read_ahead(): all chunks but the last.

`generate(prefill_chunk_size=...)` of transformers before 5.21 loses count of chunks behind the
first, and then says nonsense without a word; so nothing here depends on it.
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.generation.prompts import PromptBatch
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.models.decoder_inputs import BatchInputs, row_inputs
from penstock.models.loader import CausalLM
from penstock.models.visuals import model_arguments
from penstock.models.weight_access import model_device

OnLogits: TypeAlias = Callable[[int, Tensor], None]
"""Called with the number of a chunk's first token, padding counted, and the logits at its tokens.
[rows, tokens, vocabulary]"""


@torch.no_grad()
def read_ahead(model: CausalLM, cache: TieredCache, batch: PromptBatch, chunk: int) -> None:
    """Prefill what the cache does not hold yet, until a chunk is left, or a chunk and a token.

    Args:
        cache: may hold tokens that the batch begins with.
        batch: padded on the left, as `generate` will get it.
        chunk: tokens per forward pass, at least 2: a single one would be a decode step.
    """
    called = _Forward(model, cache, batch)
    for begin, end in _chunks(cache, batch.padded_tokens, chunk):
        if end < batch.padded_tokens:
            called(begin, end)


def prefill(
    model: CausalLM, cache: TieredCache, batch: PromptBatch, chunk: int,
    on_logits: OnLogits | None = None, on_chunk: Callable[[int], None] = lambda done: None,
) -> Tensor:  # fmt: skip
    """As `prefill_chunks`, in one call.

    Args:
        on_chunk: called with the tokens that are in behind each chunk, padding counted.
    """
    chunks = prefill_chunks(model, cache, batch, chunk, on_logits)
    while True:
        try:
            on_chunk(next(chunks))
        except StopIteration as end:
            last: Tensor = end.value
            return last


@torch.no_grad()
def prefill_chunks(
    model: CausalLM, cache: TieredCache, batch: PromptBatch, chunk: int,
    on_logits: OnLogits | None = None,
) -> Generator[int, None, Tensor]:  # fmt: skip
    """Prefill what the cache does not hold yet, at least a token.

    Args:
        cache: may hold tokens that the batch begins with.
        batch: padded on the left.
        chunk: tokens per forward pass, at least 2: a single one would be a decode step.
        on_logits: gets the logits at every token, of a chunk at a time.

    Yields:
        The tokens that are in behind each chunk, padding counted.

    Returns:
        Logits behind the last token. float32 [rows, vocabulary]

    Raises:
        PromptError: pictures do not fit the model, or their pixels are not there any more.
        UnsupportedModelError: pictures of this model cannot be read chunk by chunk; says why.
    """
    called = _Forward(model, cache, batch)
    last = torch.empty(0)
    for begin, end in _chunks(cache, batch.padded_tokens, chunk):
        logits = called(begin, end, keeps_all=on_logits is not None)
        if on_logits is not None:
            on_logits(begin, logits)
        last = logits[:, -1].to(torch.float32, copy=True)
        del logits  # or two chunks' would be there at once
        yield end
    return last


def _chunks(cache: TieredCache, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """What a cache does not hold, in parts, of which the last may be a token longer."""
    assert chunk >= 2, chunk
    begin = cache.get_seq_length()
    if not cache.takes_chunks:
        chunk = max(chunk, end)
    while end - begin > chunk + 1:
        yield begin, begin + chunk
        begin += chunk
    yield begin, end


class _Forward:
    """A model's forward pass over a range of a batch's tokens."""

    def __init__(self, model: CausalLM, cache: TieredCache, batch: PromptBatch) -> None:
        self._called: Any = model
        device = model_device(model)
        self._ids, self._mask = batch.input_ids.to(device), batch.attention_mask.to(device)
        self._positions = (self._mask.cumsum(dim=1) - 1).clamp_min(0)
        self._calls = cache.decoder_calls
        # A model with positions of its own would make them of the newest prompt's difference.
        has_axes = self._calls is not None and self._calls.has_axes
        self._gives_positions = has_axes or not bool(self._mask.all())
        self._takes_last = "logits_to_keep" in inspect.signature(self._called.forward).parameters
        self._tiered, self._cache = cache, cache_argument(model, cache)
        self._inputs = _visual_inputs(model, cache, batch)

    def __call__(self, begin: int, end: int, *, keeps_all: bool = False) -> Tensor:
        """Logits, of the last token at least. [rows, tokens, vocabulary]"""
        options: dict[str, Any] = {}
        if self._gives_positions:
            options["attention_mask"] = self._mask[:, :end]
            options["position_ids"] = self._positions[:, begin:end]
        else:
            options |= position_argument(self._called, self._tiered, begin, end, len(self._ids))
        if self._takes_last and not keeps_all:
            options["logits_to_keep"] = 1
        ids = self._ids[:, begin:end]
        given: AbstractContextManager[None] = nullcontext()
        if self._calls is not None and self._inputs is not None:
            given = self._calls.given(self._inputs.chunk(begin, end))
        with given:
            logits: Tensor = self._called(ids, **self._cache, **options, use_cache=True).logits
        return logits


def _visual_inputs(model: CausalLM, cache: TieredCache, batch: PromptBatch) -> BatchInputs | None:
    """What the decoder gets of the tokens that the cache does not hold, where pictures are among
    them."""
    held = cache.get_seq_length()
    rows = []
    has_new = False
    for ids, visuals in zip(batch.token_ids, batch.visuals, strict=True) if batch.visuals else ():
        first = max(0, held - (batch.padded_tokens - len(ids)))
        new = [each for each in visuals if each.end > first]
        has_new |= bool(new)
        rows.append((ids[first:], [each.moved(-first) for each in new]))
    if not has_new:
        return None
    made = [
        row_inputs(model, torch.tensor(ids), model_arguments(ids, visuals)) for ids, visuals in rows
    ]
    return BatchInputs(made, cache)
