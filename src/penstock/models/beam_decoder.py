"""ModelBeamDecoder: a transformers model over a memory for beams; make_decoder() makes one."""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.closing import close_all
from penstock.core.errors import ConfigError
from penstock.core.ledger import MemoryReport
from penstock.core.on_device import on_device
from penstock.core.trace import Tracer
from penstock.engine.beams.beam_memory import BeamMemory
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.engine.beams.block_tree import Path
from penstock.engine.beams.decoding import Beam, GroupDone, StepRequest, StepResult
from penstock.engine.beams.make_beam_memory import STRATEGIES, MemoryRequest, make_beam_memory
from penstock.models.attention_adapter import Attachment
from penstock.models.beam_cache import BeamCache, block_shape
from penstock.models.cache_argument import cache_argument
from penstock.models.cache_settings import beams_limit_bytes
from penstock.models.group_runner import GroupRunner
from penstock.models.model_shape import check_rope, decoder_config
from penstock.models.weight_access import model_device

Given = ParamSpec("Given")
Found = TypeVar("Found")
_CHUNK_TOKENS = 512
"""Tokens of a prompt in one forward pass."""


def _on_its_device(
    method: Callable[Concatenate["ModelBeamDecoder", Given], Found],
) -> Callable[Concatenate["ModelBeamDecoder", Given], Found]:
    """The method with the decoder's GPU as the current one."""

    @functools.wraps(method)
    def wrapped(decoder: "ModelBeamDecoder", /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        with on_device(decoder.device):
            return method(decoder, *args, **kwargs)

    return wrapped


class ModelBeamDecoder:
    """The `BeamDecoder` of a transformers model.

    The model is not modified: its attention implementation is Penstock's while the decoder is open.

    Attributes:
        device: where the model is
        vocabulary: token ids are below it.
        max_tokens: most tokens of a sequence, prompt included.
        notices: what a user may want to know, in sentences.
    """

    def __init__(
        self, model: PreTrainedModel, memory: BeamMemory, *, beams: int, max_tokens: int,
        cuda_graphs: bool,
    ) -> None:  # fmt: skip
        """Switch the model over; the memory is the decoder's to close from now on."""
        self.max_tokens = max_tokens
        self.vocabulary = int(decoder_config(model).vocab_size)
        self._model: Any = model
        self._memory, self.device = memory, memory.device
        self._full_bytes = memory.shape.kv.full_cache_bytes(beams, max_tokens)
        self._logits: dict[Path, Tensor] = {}
        self._cache = BeamCache(model, memory)
        self._runner = GroupRunner(model, self._cache, memory, cuda_graphs=cuda_graphs)
        self._attachment = Attachment(model)
        self.notices = self._runner.notices

    @property
    def store_description(self) -> str:
        """Where blocks lie that are not in fast memory; says so when the device is simulated."""
        return self._memory.description

    @property
    def simulated(self) -> str | None:
        """Name of the simulated device, or None."""
        return self._memory.simulated

    def report(self) -> MemoryReport:
        """What the beams hold in fast memory, item by item."""
        return self._memory.report(self._full_bytes)

    @_on_its_device
    def prefill(
        self, token_ids: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Beam:
        """Read a prompt, chunk by chunk.

        Raises:
            BudgetError: fast memory does not hold it.
            ConfigError: it is empty or too long.
        """
        total = len(token_ids)
        if not 0 < total <= self.max_tokens:
            raise ConfigError(f"a prompt of {total} tokens; 1 to {self.max_tokens} can be read")
        path, memory = Path(), self._memory
        ids = torch.tensor(token_ids, device=memory.device)
        logits = None
        for first in range(0, total, _CHUNK_TOKENS):
            chunk = ids[first : first + _CHUNK_TOKENS]
            self._cache.past = first
            memory.begin_chunk(path, len(chunk))
            positions = torch.arange(first, first + len(chunk), device=memory.device)
            with torch.no_grad():
                logits = self._model(
                    input_ids=chunk[None], position_ids=positions[None],
                    **cache_argument(self._model, self._cache), use_cache=True,
                    **self._runner.options,
                ).logits[0, -1].clone()  # fmt: skip
            memory.end_chunk(path, len(chunk))
            if progress is not None:
                progress(path.length, total)
        assert logits is not None
        self._logits[path] = logits
        return path

    def fork(self, beam: Beam, count: int) -> list[Beam]:
        """So many beams that go on from this one, copy-on-write."""
        assert isinstance(beam, Path)
        forks = [self._memory.fork(beam) for _ in range(count)]
        self._logits.update(dict.fromkeys(forks, self._logits[beam]))
        return [*forks]

    @_on_its_device
    def run_step(self, beams: Sequence[Beam], request: StepRequest) -> StepResult:
        """Extend the beams in place, group by group.

        Raises:
            BudgetError: fast memory does not hold a single beam at the step's end.
            ConfigError: the step passes `max_tokens`.
            FetchError: the slow tier failed.
        """
        paths = [beam for beam in beams if isinstance(beam, Path)]
        assert len(paths) == len(beams), "beams of another decoder"
        longest = max((path.length for path in paths), default=0)
        if longest + request.num_tokens > self.max_tokens:
            raise ConfigError(
                f"a step of {request.num_tokens} tokens after {longest} passes the "
                f"{self.max_tokens} that this decoder was made for"
            )
        start, memory = time.perf_counter(), self._memory
        groups = memory.begin_step(paths, request.num_tokens)
        tokens: list[list[int]] = [[] for _ in paths]
        logs: list[list[float]] = [[] for _ in paths]
        for index, group in enumerate(groups):
            memory.begin_group(index)
            lengths = [paths[i].length for i in group]
            logits = torch.stack([self._logits[paths[i]] for i in group])
            with torch.no_grad():
                done = self._runner.run(group, lengths, logits, request)
            memory.end_group([n + len(t) for n, t in zip(lengths, done.token_ids, strict=True)])
            for row, i in enumerate(group):
                tokens[i], logs[i] = done.token_ids[row], done.log_probabilities[row]
                self._logits[paths[i]] = done.logits[row]
            if request.on_group is not None:
                request.on_group(GroupDone(
                    index=index, num_groups=len(groups), num_beams=len(group),
                    traffic=memory.traffic,
                ))  # fmt: skip
        traffic = memory.end_step()
        traffic.seconds = time.perf_counter() - start
        return StepResult(token_ids=tokens, log_probabilities=logs, groups=groups, traffic=traffic)

    def lengthen(self, beam: Beam, num_tokens: int) -> None:
        """As if so many tokens had been decoded and saved, whatever they hold: for benchmarks that
        look at one step of a long search. The logits of the next token stay what they were.

        Args:
            num_tokens: up to the end of a block, from the end of a block.

        Raises:
            ConfigError: the beam would pass `max_tokens`.
        """
        assert isinstance(beam, Path)
        if beam.length + num_tokens > self.max_tokens:
            raise ConfigError(f"{num_tokens} tokens after {beam.length} pass {self.max_tokens}")
        self._memory.lengthen(beam, num_tokens)

    @_on_its_device
    def pretend_step(self, beams: Sequence[Beam], num_tokens: int) -> StepResult:
        """Move all that a step of so many tokens moves and compute nothing, for benchmarks: the
        new tokens' keys and values are whatever lies there. The logits stay what they were.

        Raises:
            BudgetError: fast memory does not hold a single beam at the step's end.
            FetchError: the slow tier failed.
        """
        paths = [beam for beam in beams if isinstance(beam, Path)]
        start, memory = time.perf_counter(), self._memory
        groups = memory.begin_step(paths, num_tokens)
        for index, group in enumerate(groups):
            memory.begin_group(index)
            lengths = [paths[i].length for i in group]
            for token in range(1, num_tokens + 1):
                memory.token_done([length + token for length in lengths])
            memory.end_group([length + num_tokens for length in lengths])
        traffic = memory.end_step()
        traffic.seconds = time.perf_counter() - start
        return StepResult(token_ids=[], log_probabilities=[], groups=groups, traffic=traffic)

    def release(self, beam: Beam) -> None:
        """Let a beam go; blocks that no other beam holds are free again."""
        assert isinstance(beam, Path)
        self._memory.release(beam)
        self._logits.pop(beam, None)

    def close(self) -> None:
        """Give files and memory back and the model its attention; twice does nothing."""
        close_all(
            self._attachment.detach, self._logits.clear, self._runner.close, self._memory.close
        )


def make_decoder(
    model: PreTrainedModel,
    *,
    beams: int,
    width: int,
    max_tokens: int,
    memory: int | float | str | None = None,
    store: str | FilePath = "auto",
    strategy: str = "scheduled",
    overlap: bool = True,
    balance: bool = True,
    prefetch: bool = True,
    share: bool = True,
    block_tokens: int = 16,
    cuda_graphs: bool = True,
    tracer: Tracer | None = None,
) -> ModelBeamDecoder:
    """A decoder for one search.

    Args:
        model: any decoder of transformers that uses the attention interface.
        beams: candidates of a step, that is sequences held at once.
        width: of them, so many go on from one beam.
        max_tokens: most tokens of a sequence, prompt included.
        memory: fast memory: bytes, "1GiB", a fraction of what all beams take at `max_tokens`
            ("1/4"), "auto" (at most half of what is free now, and at each step no more than the
            host then has to spare; all of it where the strategy is "resident"), or None for as
            much as they take.
        store: the slow tier: see `KVStore.create`; on a GPU "auto" and "memory" are pinned host
            memory.
        strategy: "scheduled", "resident", or "layerwise" (the paper's baseline).
        overlap, balance, prefetch, share: see `ScheduledMemory` and `ScheduleSettings`.
        block_tokens: tokens of a block.
        cuda_graphs: on a GPU, record a group's token once and replay it.
        tracer: collects spans of moves.

    Raises:
        UnsupportedModelError: the model cannot work here; says why.
        BudgetError: fast memory does not hold one beam; names the smallest that would do.
        ConfigError: another argument makes no sense.
        StorageError: the store cannot be used.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"there is no strategy {strategy!r}; choose from {', '.join(STRATEGIES)}")
    if min(beams, width, max_tokens, block_tokens) < 1:
        raise ConfigError(f"{beams=}, {width=}, {max_tokens=}, {block_tokens=} must be positive")
    _refuse_host(str(store))
    shape = block_shape(model, block_tokens)
    check_rope(model, max_tokens)
    device = model_device(model)
    full = -(-max_tokens // block_tokens) * beams * shape.block_bytes
    everything = strategy == "resident" and memory == "auto"
    limit = None if everything else beams_limit_bytes(memory, full, device)
    made = make_beam_memory(MemoryRequest(
        shape=shape, beams=beams, max_tokens=max_tokens, device=device, store=str(store),
        limit_bytes=limit, strategy=strategy, prefetch=prefetch,
        settings=ScheduleSettings(overlap=overlap, balance=balance, share=share, follow=share),
        follows_system=memory == "auto" and device.type == "cpu", tracer=tracer,
    ))  # fmt: skip
    try:
        return ModelBeamDecoder(
            model, made, beams=beams, max_tokens=max_tokens, cuda_graphs=cuda_graphs
        )
    except BaseException:
        made.close()
        raise


def _refuse_host(store: str) -> None:
    """Refuse what is a tier of caches and would be a new folder here."""
    if store == "host":
        raise ConfigError(
            "store=host is for caches, whose GPU reads host memory by itself; give memory, which "
            "is host memory here, or ./host for a folder of that name"
        )
