"""read_ahead(): a prompt's chunks but the last, read into a cache before `generate` goes on.

`generate(prefill_chunk_size=...)` of transformers before 5.21 loses count of chunks behind the
first, and then says nonsense without a word; so nothing here depends on it.
"""

import inspect
from typing import Any

import torch

from penstock.generation.prompts import PromptBatch
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM


@torch.no_grad()
def read_ahead(model: CausalLM, cache: TieredCache, batch: PromptBatch, chunk: int) -> None:
    """Prefill what the cache does not hold yet, until a chunk is left, or a chunk and a token.

    Args:
        cache: may hold tokens that the batch begins with.
        batch: padded on the left, as `generate` will get it.
        chunk: tokens per forward pass, at least 2: a single one would be a decode step.
    """
    assert chunk >= 2, chunk
    called: Any = model
    ids, mask = batch.input_ids.to(called.device), batch.attention_mask.to(called.device)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    is_padded = not bool(mask.all())
    takes_last = "logits_to_keep" in inspect.signature(called.forward).parameters
    last: dict[str, Any] = {"logits_to_keep": 1} if takes_last else {}
    done = cache.get_seq_length()
    while batch.padded_tokens - done > chunk + 1:
        end = done + chunk
        padding = {}
        if is_padded:
            padding = {"attention_mask": mask[:, :end], "position_ids": positions[:, done:end]}
        called(ids[:, done:end], **cache_argument(model, cache), **padding, **last, use_cache=True)
        done = end
