"""The estimate for shared blocks is what the scheduled engine loads, for the same search."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.ledger import MemoryLedger
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_memory import BlockShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.engine.beams.block_tree import Path
from penstock.engine.beams.scheduled_memory import ScheduledMemory
from penstock.engine.beams.slow_tier import Move, SlowTier
from penstock.search.transfer_estimate import random_parents, with_shared_blocks
from penstock.search.transfer_model import TransferRequest, step_by_step

KV = KVShape(num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
BLOCK_BYTES = 16 * KV.token_bytes


def request(
    beams: int = 16, step: int = 32, new: int = 384, blocks: int = 60, prompt: int = 128
) -> TransferRequest:
    return TransferRequest.of_shape(
        KV,
        beams=beams,
        step_tokens=step,
        prompt_tokens=prompt,
        new_tokens=new,
        memory_bytes=blocks * BLOCK_BYTES,
    )


class NoMove(Move):
    def wait(self) -> None:
        pass


class NoTier(SlowTier):
    """Moves nothing: the engine's counts are what is looked at."""

    description = "nothing"

    def __init__(self, num_slots: int) -> None:
        self.slots = torch.zeros(num_slots, BLOCK_BYTES, dtype=torch.uint8)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        return NoMove()

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Move:
        return NoMove()

    def close(self) -> None:
        pass


def engine_loads(
    search: TransferRequest,
    parents: list[NDArray[np.int64]],
    options: ScheduleSettings,
    prefetch: bool,
) -> list[int]:
    """Bytes that the engine's memory asks its slow tier for, step by step."""
    memory = ScheduledMemory(
        BlockShape(kv=KV, block_tokens=16, windows=(None,)),
        MemoryLedger(1 << 30),
        NoTier(search.memory_bytes // BLOCK_BYTES),
        torch.device("cpu"),
        settings=options,
        max_tokens=search.final_tokens,
        prefetch=prefetch,
    )
    root = Path()
    memory.begin_chunk(root, search.prompt_tokens)
    memory.end_chunk(root, search.prompt_tokens)
    beams = [memory.fork(root) for _ in range(search.beams)]
    memory.release(root)
    loaded = []
    starts, ends = (each.tolist() for each in search.bounds)
    for step, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if step:
            children = [memory.fork(beams[parent]) for parent in parents[step - 1]]
            for beam in beams:
                memory.release(beam)
            beams = children
        for index, group in enumerate(memory.begin_step(beams, end - start)):
            memory.begin_group(index)
            for length in range(start + 1, end + 1):
                memory.token_done([length] * len(group))
            memory.end_group([end] * len(group))
        loaded.append(memory.end_step().loaded_bytes)
    return loaded


@pytest.mark.parametrize(
    ("options", "seed"),
    [
        (ScheduleSettings(), 0),
        (ScheduleSettings(balance=False, follow=False), 1),
        (ScheduleSettings(overlap=False), 0),
        (ScheduleSettings(share=True), 1),
        (ScheduleSettings(share=True, balance=False), 0),
    ],
    ids=["all", "greedy", "no overlap", "share", "share greedy"],
)
def test_the_estimate_is_what_the_engine_loads(options: ScheduleSettings, seed: int) -> None:
    search = request()
    parents = random_parents(search, seed)
    made = with_shared_blocks(search, parents=parents, settings=options)
    assert made.total_bytes > 0
    assert not made.is_estimate
    assert made.loaded_bytes.tolist() == engine_loads(search, parents, options, prefetch=False)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("step", "prompt"), [(32, 128), (24, 100)])
def test_prefetch_and_unfilled_blocks_change_little(share: bool, step: int, prompt: int) -> None:
    search = request(step=step, prompt=prompt)
    parents, options = random_parents(search, 3), ScheduleSettings(share=share)
    made = with_shared_blocks(search, parents=parents, settings=options).total_bytes
    measured = sum(engine_loads(search, parents, options, prefetch=True))
    assert made == pytest.approx(measured, rel=0.05)


def test_without_overlap_it_is_the_convention_start() -> None:
    search = request()
    made = with_shared_blocks(search, settings=ScheduleSettings(overlap=False))
    assert made.loaded_bytes.tolist() == step_by_step(search, "start").loaded_bytes.tolist()
    assert made.groups.tolist() == step_by_step(search, "start").groups.tolist()


def test_sharing_and_reuse_save() -> None:
    search = request(beams=32, new=512, blocks=200)
    nothing, group, memory = (
        with_shared_blocks(search, reuse=reuse).total_bytes
        for reuse in ("nothing", "group", "memory")
    )
    shared = with_shared_blocks(search, settings=ScheduleSettings(share=True))
    assert step_by_step(search).total_bytes > 2 * nothing  # the paper's Fig. 10b
    assert nothing > group > memory > shared.total_bytes
    assert shared.groups.max() < with_shared_blocks(search).groups.max()


def test_beams_that_share_only_the_prompt_load_most() -> None:
    search = request(blocks=80)
    straight = [range(16)] * 11  # every beam goes on by itself
    one_family = [[0] * 16] * 11  # all go on from one
    apart = with_shared_blocks(search, parents=straight).total_bytes
    close = with_shared_blocks(search, parents=one_family).total_bytes
    drawn = with_shared_blocks(search).total_bytes
    assert close < drawn < apart < step_by_step(search).total_bytes


def test_it_is_an_estimate_and_seeded() -> None:
    search = request()
    made = with_shared_blocks(search, seed=5)
    assert made.is_estimate
    assert made.loaded_bytes.tolist() == with_shared_blocks(search, seed=5).loaded_bytes.tolist()
    assert made.total_bytes != with_shared_blocks(search, seed=6).total_bytes


def test_survivors_go_on_as_width_beams() -> None:
    for width in (1, 2, 4, 16):
        for chosen in random_parents(replace(request(), width=width)):
            assert len(chosen) == 16
            assert set(np.unique(chosen, return_counts=True)[1].tolist()) == {width}


def test_nothing_is_loaded_while_everything_fits() -> None:
    search = request(blocks=16 * 32)
    assert with_shared_blocks(search).total_bytes == 0
    assert with_shared_blocks(search, reuse="nothing").total_bytes == 0
    assert with_shared_blocks(search).groups.tolist() == [1] * 12


def test_a_search_may_end_early_and_beams_may_leave() -> None:
    steps: list[tuple[int, int]] = []
    made = with_shared_blocks(
        request(),
        parents=[[0, 0, 3, 3, 5], [4, 1]],
        progress=lambda done, of: steps.append((done, of)),
    )
    assert made.starts.tolist() == [128, 160, 192]
    assert made.groups.tolist() == [3, 1, 1]  # 6 of 10 blocks fit; then 5 beams, 2 beams
    assert steps == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("parents", [[[16]], [[-1]], [[]], [[1, 2], [2]]])
def test_parents_that_were_not_there(parents: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="candidates of the step before"):
        with_shared_blocks(request(), parents=parents)


def test_memory_for_less_than_one_beam() -> None:
    assert with_shared_blocks(request(blocks=32)).groups[-1] == 16
    with pytest.raises(BudgetError, match="does not hold one beam"):
        with_shared_blocks(request(blocks=31))
