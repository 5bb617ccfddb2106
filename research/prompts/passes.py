"""Prompt: rows of tokens that a model reads chunk by chunk, and what a reading took."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device

_PADDED_SHARE = 16
"""Row i of a batch is padded by i parts in so many of its length."""


@dataclass(kw_only=True)
class Pass:
    """What one reading took; CPU time is the process's, of all threads."""

    seconds: float
    """From the first chunk to the last one's logits."""
    cpu_s: float
    first_token_s: float
    """To the end of the first decode step: an index that is made late is in it."""
    first_token_cpu_s: float
    logits: Tensor
    """Behind the prompt. float32 [rows, vocabulary]"""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without logits."""
        return {name: value for name, value in asdict(self).items() if name != "logits"}

    @staticmethod
    def warm(model: CausalLM) -> float:
        """One short pass, so that the first one measured finds weights and kernels ready; s."""
        start = time.perf_counter()
        called: Any = model
        with torch.no_grad():
            called(torch.zeros(1, 64, dtype=torch.int64, device=model_device(model)))
        return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Rows of equal length, padded on the left where there are several."""

    ids: Tensor
    mask: Tensor
    chunk: int

    @classmethod
    def of(cls, model: CausalLM, ids: Sequence[int], rows: int, chunk: int) -> "Prompt":
        """Cut `ids` into rows."""
        table = torch.tensor(ids).view(rows, -1)
        padding = torch.arange(rows)[:, None] * (table.shape[1] // _PADDED_SHARE)
        mask = (torch.arange(table.shape[1]) >= padding).long()
        device = model_device(model)
        return cls(ids=table.to(device), mask=mask.to(device), chunk=chunk)

    @property
    def rows(self) -> int:
        """Of the batch."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Of a row, padding included."""
        return self.ids.shape[1]

    @torch.no_grad()
    def read(self, model: CausalLM, cache: Any) -> Pass:
        """Read it into a cache of transformers or of ours, and decode one token."""
        start = (time.perf_counter(), time.process_time())
        logits = torch.empty(0)
        for first in range(0, self.tokens, self.chunk):
            logits = self._forward(model, cache, first, min(first + self.chunk, self.tokens))
        read = (time.perf_counter(), time.process_time())
        self._forward(model, cache, self.tokens, self.tokens + 1, logits.argmax(-1, keepdim=True))
        end = (time.perf_counter(), time.process_time())
        return Pass(
            seconds=read[0] - start[0], cpu_s=read[1] - start[1],
            first_token_s=end[0] - start[0], first_token_cpu_s=end[1] - start[1],
            logits=logits.float(),
        )  # fmt: skip

    def _forward(
        self, model: CausalLM, cache: Any, begin: int, end: int, chosen: Tensor | None = None
    ) -> Tensor:
        """Logits of the last token. [rows, vocabulary]"""
        called: Any = model
        options: dict[str, Any] = {}
        mask = torch.nn.functional.pad(self.mask, (0, max(0, end - self.tokens)), value=1)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, begin:end]
        if self.rows > 1:
            options["attention_mask"] = mask[:, :end]
        ids = self.ids[:, begin:end] if chosen is None else chosen
        out = called(
            ids, **cache_argument(model, cache), position_ids=positions, use_cache=True,
            logits_to_keep=1, **options,
        ).logits  # fmt: skip
        if out.device.type == "cuda":
            torch.cuda.synchronize()
        logits: Tensor = out[:, -1]
        return logits
