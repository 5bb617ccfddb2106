"""GroupRunner: the tokens of one group's step; on a GPU one CUDA graph for each."""

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.beams.beam_memory import BeamMemory
from penstock.engine.beams.decoding import Choose, StepRequest
from penstock.engine.beams.group_tensors import GroupTensors
from penstock.engine.device_tier.recording import recording
from penstock.models.beam_cache import BeamCache
from penstock.models.cache_argument import cache_argument

_MOST_GRAPHS = 16
_WARM_UP_TOKENS = 2
"""Run one launch at a time first, for each shape: kernels are compiled in them."""


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """What a group's step gave."""

    token_ids: list[list[int]]
    log_probabilities: list[list[float]]
    logits: Tensor
    """Of the token after the last one. [rows, vocabulary]"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the token loop of one group keeps its numbers; addresses stay, for graphs."""

    logits: Tensor
    """[rows, vocabulary]"""
    uniforms: Tensor
    """float64 [rows, num_tokens]"""
    active: Tensor
    """Rows whose step has not ended. bool [rows]"""
    step: Tensor
    """How many tokens are done. int64 [1]"""
    token_ids: Tensor
    """int64 [rows, num_tokens]"""
    log_probabilities: Tensor
    """float32 [rows, num_tokens]"""

    @classmethod
    def make(cls, logits: Tensor, uniforms: Tensor) -> "_Place":
        device = logits.device
        return cls(
            logits=logits.clone(),
            uniforms=uniforms.to(device),
            active=torch.ones(len(logits), dtype=torch.bool, device=device),
            step=torch.zeros(1, dtype=torch.int64, device=device),
            token_ids=torch.zeros(uniforms.shape, dtype=torch.int64, device=device),
            log_probabilities=torch.zeros(uniforms.shape, dtype=torch.float32, device=device),
        )

    def begin(self, logits: Tensor, uniforms: Tensor) -> None:
        self.logits.copy_(logits)
        self.uniforms.copy_(uniforms)
        self.active.fill_(True)
        self.step.zero_()


@dataclass(slots=True)
class _Recorded:
    """A graph and what it refers to."""

    place: _Place
    tensors: GroupTensors
    choose: Choose
    graph: torch.cuda.CUDAGraph | None = None
    tokens_run: int = 0


class GroupRunner:
    """Draws and feeds tokens, one for every row of the group at a time.

    A row whose step has ended goes along without effect: its length stays, what it writes lies
    behind its end, and its logits are kept.
    """

    def __init__(
        self, model: PreTrainedModel, cache: BeamCache, memory: BeamMemory, *, cuda_graphs: bool
    ) -> None:
        self._model: Any = model
        self._cache, self._memory = cache, memory
        takes_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"logits_to_keep": 1} if takes_last else {}
        self._records = cuda_graphs and memory.is_static and memory.device.type == "cuda"
        self._recorded: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._pool: Any = None
        self.notices: list[str] = []

    def run(
        self, indices: Sequence[int], lengths: Sequence[int], logits: Tensor, request: StepRequest
    ) -> GroupTokens:
        """Run the group whose turn it is in the memory.

        Args:
            indices: of its beams in the request.
            lengths: of its sequences.
            logits: of each row's next token. [rows, vocabulary]
        """
        uniforms = request.uniforms[list(indices)]
        record = self._place(logits, uniforms, request.choose)
        place, rows = record.place, len(indices)
        counts = [0] * rows
        tokens: list[list[int]] = [[] for _ in range(rows)]
        now, active = list(lengths), [True] * rows
        for step in range(request.num_tokens):
            self._cache.past = max(now)
            self._advance(record)
            for row in range(rows):
                now[row] += active[row]
                counts[row] += active[row]
            self._memory.token_done(now)
            if request.stops is not None:
                self._stop(record, request, indices, step, tokens, active)
                if not any(active):
                    break
        ids, logs = place.token_ids.tolist(), place.log_probabilities.tolist()
        return GroupTokens(
            [each[:n] for each, n in zip(ids, counts, strict=True)],
            [each[:n] for each, n in zip(logs, counts, strict=True)],
            place.logits.clone(),
        )

    def close(self) -> None:
        """Give graphs and their memory back."""
        self._recorded.clear()
        self._pool = None

    def _stop(
        self, record: _Recorded, request: StepRequest, indices: Sequence[int], step: int,
        tokens: list[list[int]], active: list[bool],
    ) -> None:  # fmt: skip
        """Ask which rows end with this token; `tokens` and `active` are brought up to date."""
        assert request.stops is not None
        newest, changed = record.place.token_ids[:, step].tolist(), False
        for row, beam in enumerate(indices):
            if active[row]:
                tokens[row].append(newest[row])
                active[row] = not request.stops(beam, tokens[row])
                changed |= not active[row]
        if changed:
            record.place.active.copy_(torch.tensor(active))

    def _place(self, logits: Tensor, uniforms: Tensor, choose: Choose) -> _Recorded:
        group = self._memory.group
        if not self._records:
            return _Recorded(_Place.make(logits, uniforms), group, choose)
        key = (id(group), uniforms.shape[1])
        record = self._recorded.get(key)
        if record is None or record.tensors is not group or record.choose is not choose:
            record = _Recorded(_Place.make(logits, uniforms), group, choose)
            self._recorded[key] = record
            while len(self._recorded) > _MOST_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        record.place.begin(logits, uniforms)
        return record

    def _advance(self, record: _Recorded) -> None:
        """One token of every row."""
        if record.graph is None and self._records:
            record.tokens_run += 1
            if record.tokens_run > _WARM_UP_TOKENS:
                self._record(record)
        if record.graph is None:
            self._token(record)
        else:
            record.graph.replay()

    def _record(self, record: _Recorded) -> None:
        """Record the token; nothing of it has run when this returns."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with recording(graph, self._pool):
                self._token(record)
        except (RuntimeError, ValueError, TypeError) as error:
            self._records = False
            self._cache.forget_awaited()
            self.notices.append(f"decoding without CUDA graphs: {str(error).splitlines()[0]}")
            return
        self._pool = graph.pool()
        record.graph = graph

    def _token(self, record: _Recorded) -> None:
        """Draw a token for every row and feed it; operations on the device alone."""
        place, group = record.place, record.tensors
        uniforms = place.uniforms.index_select(1, place.step)[:, 0]
        ids, logs = record.choose(place.logits, uniforms)
        place.token_ids.index_copy_(1, place.step, ids[:, None])
        place.log_probabilities.index_copy_(1, place.step, logs[:, None].float())
        torch.add(group.lengths, 1, out=group.places)
        group.lengths.add_(place.active.to(torch.int32))
        out = self._model(
            input_ids=ids[:, None], position_ids=(group.places - 1)[:, None].long(),
            **cache_argument(self._model, self._cache), use_cache=True, **self.options,
        )  # fmt: skip
        newest = out.logits[:, -1]
        place.logits.copy_(torch.where(place.active[:, None], newest, place.logits))
        place.step.add_(1)
