"""What a search will load where beams share blocks: an estimate, by playing the schedule through.

The blocks of every beam are followed from step to step, and grouped, kept and loaded by the very
functions on sets of blocks that the engine calls (`engine/beams/beam_schedule.py`).

Source: Wang et al., "Locality-Aware Beam Scheduling for Efficient Test-Time Compute with a
Consumer-Grade GPU", inter-beam locality (4.1); the paper gives no equation for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.engine.beams.beam_schedule import (
    DEFAULT_SETTINGS,
    Blocks,
    ScheduleSettings,
    blocks_to_load,
    distinct_blocks,
    keep_order,
    schedule_beams,
    slots_needed,
)
from penstock.search.transfer_model import TransferRequest, Transfers, require_one_beam

Parents: TypeAlias = Sequence[Sequence[int] | NDArray[np.int64]]
"""For each step but the first: which candidate of the step before each candidate goes on from."""
Reuse: TypeAlias = Literal["memory", "group", "nothing"]
"""What a group finds in fast memory: all that lay there and did not have to go (`keep_order`);
what the group before held; nothing, as in the paper."""
Progress: TypeAlias = Callable[[int, int], None]
"""(steps done, steps in all)"""


def with_shared_blocks(
    request: TransferRequest,
    *,
    parents: Parents | None = None,
    settings: ScheduleSettings = DEFAULT_SETTINGS,
    reuse: Reuse = "memory",
    seed: int = 0,
    progress: Progress | None = None,
) -> Transfers:
    """Beam scheduling with inter-beam locality: a group loads a block once for all its beams.

    What is loaded are blocks that exist at the start of a step (whole ones) and do not lie in
    fast memory. Prefetch is left out: it moves loads to an earlier time, and takes slots from few
    blocks that would have been of use.

    It is an ESTIMATE unless `parents` are those of the very search that it is compared with: how
    much beams share depends on who survives. Survivors drawn at random, the default, say what to
    expect of a scorer that favours no branch; one that does shares more.

    Args:
        parents: of a real search; the steps end with them. None: a simulated search
            (`random_parents`).
        settings: of the schedule; `share` keeps one copy in fast memory, so that more beams fit;
            without `overlap` every beam loads everything, which is convention "start" of Eq. 5.
        reuse: what a group finds in fast memory; see `Reuse`.
        seed: of the simulated search.

    Raises:
        ConfigError: `parents` name a candidate that there was not.
        BudgetError: fast memory does not hold one beam to the end.
    """
    block = request.block_tokens
    require_one_beam(request, -(-request.final_tokens // block) * block)
    genealogy: Parents = random_parents(request, seed) if parents is None else parents
    starts = request.bounds[0][: len(genealogy) + 1]
    block_bytes = request.beam_token_bytes * block
    prompt = np.arange(-(-request.prompt_tokens // block), dtype=np.int64)
    memory = _FastMemory(request.memory_bytes // block_bytes, settings, reuse, prompt)
    loaded, groups = np.zeros_like(starts), np.zeros_like(starts)
    for step, (candidates, extended) in enumerate(_tree(request, prompt, genealogy)):
        blocks, groups[step] = memory.run_step(candidates, extended)
        loaded[step] = blocks * block_bytes
        if progress is not None:
            progress(step + 1, len(starts))
    return Transfers(starts=starts, loaded_bytes=loaded, groups=groups, is_estimate=parents is None)


def random_parents(request: TransferRequest, seed: int = 0) -> list[NDArray[np.int64]]:
    """A simulated search: beams / width survivors of each step, drawn at random without putting
    back, each going on as `width` beams. int64 [beams] for each step but the first."""
    draw = np.random.default_rng(seed)
    survivors = request.beams // request.width
    return [
        np.repeat(np.sort(draw.permutation(request.beams)[:survivors]), request.width)
        for _ in request.bounds[0][1:]
    ]


class _FastMemory:
    """Which blocks lie in fast memory while group after group runs."""

    def __init__(
        self, capacity: int, settings: ScheduleSettings, reuse: Reuse, resident: Blocks
    ) -> None:
        self._capacity = capacity
        self._settings = settings
        self._reuse = reuse if settings.overlap else "nothing"
        self._resident = resident
        """Block of each slot in use, in the order in which they came: without `share`, as often
        as beams have a copy."""

    def run_step(self, candidates: Sequence[Blocks], extended: Sequence[Blocks]) -> tuple[int, int]:
        """Blocks loaded and number of groups of a step.

        Args:
            candidates: each beam's blocks at the start of the step.
            extended: and at its end.
        """
        share = self._settings.share
        growth = _growth(candidates, extended, share)
        alive = np.isin(self._resident, np.concatenate(candidates))
        self._resident = self._resident[alive]
        groups = schedule_beams(
            candidates, growth, self._capacity, self._settings, resident=self._resident
        )
        blocks, loaded = list(candidates), 0
        for index, group in enumerate(groups):
            if self._reuse == "nothing" and len(groups) > 1:
                self._resident = self._resident[:0]
            loads = blocks_to_load(group, blocks, self._resident, once=self._settings.overlap)
            loaded += len(loads)
            free = self._capacity - slots_needed(group, blocks, growth, share=share)
            kept = self._kept(keep_order(groups, blocks, index, self._resident), free)
            for beam in group:
                blocks[beam] = extended[beam]
            own = np.concatenate([blocks[beam] for beam in group])
            self._take(loads, distinct_blocks(own) if share else own, kept)
        return loaded, len(groups)

    def _kept(self, order: Blocks, free: int) -> Blocks:
        """The slots that stay as they are, of those that lie outside the group."""
        if self._reuse != "memory":
            return order[:0]
        ids, copies = np.unique(self._resident, return_counts=True)
        stay = order[np.cumsum(copies[np.searchsorted(ids, order)]) <= free]
        return self._resident[np.isin(self._resident, stay)]

    def _take(self, loads: Blocks, own: Blocks, kept: Blocks) -> None:
        """What lies there when a group has run: its own slots and those that stayed."""
        ids, copies = np.unique(np.concatenate((own, kept)), return_counts=True)
        came = distinct_blocks(np.concatenate((self._resident, loads, own)))
        came = came[np.isin(came, ids)]
        self._resident = np.repeat(came, copies[np.searchsorted(ids, came)])


def _growth(candidates: Sequence[Blocks], extended: Sequence[Blocks], share: bool) -> list[int]:
    """Slots that each beam needs beside its blocks.

    With `share`, a last block that several hold is copied by each of them before it is written.
    """
    holders = Counter(int(start[-1]) for start in candidates)
    growth = []
    for start, end in zip(candidates, extended, strict=True):
        is_copied = share and holders[int(start[-1])] > 1 and end[len(start) - 1] != start[-1]
        growth.append(len(end) - len(start) + bool(is_copied))
    return growth


def _tree(
    request: TransferRequest,
    prompt: Blocks,
    parents: Parents,
) -> Iterator[tuple[list[Blocks], list[Blocks]]]:
    """Each step's candidates: the blocks that they start with, and those at its end.

    A partly filled last block is the parent's at the start, and an own copy at the end.
    """
    block, fresh = request.block_tokens, len(prompt)
    candidates, extended = [prompt] * request.beams, list[Blocks]()
    bounds = zip(*(each.tolist() for each in request.bounds), strict=True)
    for step, (start, end) in zip(range(len(parents) + 1), bounds, strict=False):
        if step:
            chosen = [int(parent) for parent in parents[step - 1]]
            if not chosen or min(chosen) < 0 or max(chosen) >= len(candidates):
                raise ConfigError(
                    f"parents of step {step + 1} must be 1 or more indices below "
                    f"{len(candidates)}, the candidates of the step before"
                )
            candidates = [extended[parent] for parent in chosen]
        full, new = start // block, -(-end // block) - start // block
        extended = [
            np.concatenate((each[:full], np.arange(fresh + i * new, fresh + (i + 1) * new)))
            for i, each in enumerate(candidates)
        ]
        fresh += len(candidates) * new
        yield candidates, extended
