"""Prefill and the first token: our cache against the plain model, in chunks and in one piece."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.core.errors import PenstockError
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.process_memory import PeakMemory
from penstock.evaluate.targets import Target
from penstock.evaluate.throughput_run import Say
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import plain_cache, share_weights, vocabulary_size

PLAIN, TIERED = "DynamicCache", "kvswap"


@dataclass(kw_only=True)
class PrefillRow:
    """One way to prefill and what it took."""

    name: str
    chunk: int
    """Tokens per forward pass; all of them for one piece."""
    tokens: int
    seconds: list[float] = field(default_factory=list)
    """From the first chunk to the last one's logits, round by round."""
    ttfts_s: list[float] = field(default_factory=list)
    """From the first chunk to the end of the first decode step, round by round: what a method does
    when it first selects (making an index) is in it."""
    peak_bytes: int | None = None
    """Most memory beyond what was held before the cache was made, activations included."""
    ledger_bytes: int | None = None

    skipped: str = ""
    """Why there are no times."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, of the best round."""
        return min(self.ttfts_s, default=None)

    @property
    def label(self) -> str:
        """For tables."""
        piece = "one piece" if self.chunk >= self.tokens else f"chunks of {self.chunk}"
        return f"{self.name}, {piece}"


def run_prefill(
    model: CausalLM, adapter: LowRankAdapter, *, tokens: int, context: int, memory: str,
    store: str, chunks: Sequence[int], rounds: int, say: Say, seed: int = 0,
) -> list[PrefillRow]:  # fmt: skip
    """Time every way in turn, `rounds` times, each second round backwards.

    Args:
        tokens: length of the prompt; one more is decoded.
        context: what the cache is made for (its budget is a share of that).
    """
    draw = torch.Generator().manual_seed(seed)
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(0, vocabulary_size(model), (1, tokens), generator=draw).to(device)
    rows = [PrefillRow(name=PLAIN, chunk=tokens, tokens=tokens)]
    for chunk in chunks:
        if chunk < tokens:
            rows.append(PrefillRow(name=PLAIN, chunk=chunk, tokens=tokens))
            rows.append(PrefillRow(name=TIERED, chunk=chunk, tokens=tokens))
    plain, tiered = share_weights(model), share_weights(model)
    _pass(plain, ids[:, :64], plain_cache(plain, "dynamic", 64), 64)  # warm
    peak = PeakMemory(device)
    for number in range(rounds):
        for row in rows if number % 2 == 0 else rows[::-1]:
            if row.skipped:
                continue
            say(f"prefill of {tokens} tokens: {row.label}")
            peak.start()
            if row.name == PLAIN:
                cache = plain_cache(plain, "dynamic", tokens + 1)
                seconds, ttft_s = _pass(plain, ids, cache, row.chunk)
                del cache
            else:
                try:
                    with TieredCache(
                        tiered, memory=memory, store=store, adapter=adapter,
                        max_tokens=max(context, tokens + 1),
                    ) as ours:  # fmt: skip
                        seconds, ttft_s = _pass(tiered, ids, ours, row.chunk)
                        row.ledger_bytes = ours.report().used_bytes
                except PenstockError as error:
                    row.skipped = str(error)
                    continue
            row.seconds.append(seconds)
            row.ttfts_s.append(ttft_s)
            growth = peak.growth_bytes()
            if growth is not None:
                row.peak_bytes = max(growth, row.peak_bytes or 0)
    return rows


def _pass(model: Any, ids: torch.Tensor, cache: Any, chunk: int) -> tuple[float, float]:
    """Prefill, then decode one token; seconds until the prompt's logits and until the token's."""
    start = time.perf_counter()
    tokens = ids.shape[1]
    with torch.no_grad():
        for first in range(0, tokens, chunk):
            piece = ids[:, first : first + chunk]
            logits = _forward(model, piece, first, cache)
        seconds = time.perf_counter() - start
        chosen = logits[:, -1:].argmax(-1) % vocabulary_size(model)
        _forward(model, chosen, tokens, cache)
    return seconds, time.perf_counter() - start


def _forward(model: Any, ids: torch.Tensor, first: int, cache: Any) -> torch.Tensor:
    """Logits of the last of some tokens that begin at position `first`; they are there when this
    returns. [batch, 1, vocabulary]"""
    position = torch.arange(first, first + ids.shape[1], device=ids.device)
    out = model(
        ids,
        **cache_argument(model, cache),
        position_ids=position[None],
        use_cache=True,
        logits_to_keep=1,
    )
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    logits: torch.Tensor = out.logits
    return logits


def judge_prefill(rows: Sequence[PrefillRow]) -> list[Target]:
    """Our time over the plain model's with the same chunks."""
    found = []
    for row in rows:
        same = next((r for r in rows if r.name == PLAIN and r.chunk == row.chunk), None)
        if row.name == PLAIN or row.skipped or same is None:
            continue
        ratios = [ours / theirs for ours, theirs in zip(row.seconds, same.seconds, strict=True)]
        name, value = f"prefill, {row.label} / plain, time", float(np.median(ratios))
        found.append(Target(name=name, batch=1, value=value, bound=1.10, at_least=False))
    return found


def as_figures(rows: Sequence[PrefillRow]) -> list[dict[str, Any]]:
    """Plain data for the result file."""
    return [{**asdict(row), "label": row.label, "ttft_s": row.ttft_s} for row in rows]
