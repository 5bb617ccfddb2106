"""Both memories of beams against plain attention, through forks, ragged steps and evictions."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.ledger import MemoryLedger
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.beams.beam_memory import BeamMemory, BlockShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.engine.beams.block_tree import Path
from penstock.engine.beams.file_tier import FileTier
from penstock.engine.beams.layer_tier import FileLayers
from penstock.engine.beams.layerwise_memory import LayerwiseMemory
from penstock.engine.beams.scheduled_memory import ScheduledMemory
from penstock.kernels.plain_attention import attention_twin
from penstock.testing.pairs import covering

LAYERS, HEADS, KV_HEADS, DIM, BEAMS, WIDTH, STEP, MOST = 2, 4, 2, 16, 8, 2, 10, 96
CPU = torch.device("cpu")
History = list[tuple[Tensor, Tensor]]


def block_shape(window: int | None, block_tokens: int = 4) -> BlockShape:
    kv = KVShape(
        num_layers=LAYERS, num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        dtype=torch.float32,
    )  # fmt: skip
    return BlockShape(kv=kv, block_tokens=block_tokens, windows=(None, window))


def scheduled(
    shape: BlockShape, num_slots: int, *, prefetch: bool = True,
    spare_bytes: Callable[[], int] | None = None, **options: Any,
) -> ScheduledMemory:  # fmt: skip
    return ScheduledMemory(
        shape, MemoryLedger(1 << 30), FileTier("memory", num_slots, shape.block_bytes), CPU,
        settings=ScheduleSettings(**options), max_tokens=MOST, prefetch=prefetch,
        spare_bytes=spare_bytes,
    )  # fmt: skip


def layerwise(shape: BlockShape, resident: int) -> LayerwiseMemory:
    slots = LayerwiseMemory.num_slots(shape, BEAMS, MOST, resident)
    tier = FileLayers("memory", LAYERS, slots, shape.layer_bytes)
    return LayerwiseMemory(
        shape, MemoryLedger(1 << 30), tier, CPU,
        beams=BEAMS, max_tokens=MOST, resident_slots=resident,
    )  # fmt: skip


class Search:
    """A search whose queries, keys and values are drawn; every output is checked."""

    def __init__(self, memory: BeamMemory, seed: int) -> None:
        self.memory, self.window = memory, memory.shape.windows[1]
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.groups: list[list[list[int]]] = []
        self.loaded_blocks: list[int] = []
        root, past = Path(), [(torch.zeros(1, KV_HEADS, 0, DIM),) * 2 for _ in range(LAYERS)]
        for count in (7, 6):
            memory.begin_chunk(root, count)
            for layer in range(LAYERS):
                call = self.call(1, count)
                past[layer] = self.joined(past[layer], call, 0)
                self.check(layer, memory.attend(layer, call)[0], call.query[0], past[layer])
            memory.end_chunk(root, count)
        self.beams = [(memory.fork(root), list(past)) for _ in range(BEAMS)]
        memory.release(root)

    def call(self, rows: int, count: int) -> AttentionCall:
        def normal(heads: int) -> Tensor:
            return torch.randn(rows, heads, count, DIM, generator=self.generator)

        return AttentionCall(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), 0.25)

    @staticmethod
    def joined(past: tuple[Tensor, ...], call: AttentionCall, row: int) -> tuple[Tensor, Tensor]:
        keys, values = call.keys[row : row + 1], call.values[row : row + 1]
        return torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)

    def check(self, layer: int, out: Tensor, query: Tensor, seen: tuple[Tensor, Tensor]) -> None:
        tokens, count = seen[0].shape[2], query.shape[1]
        queries = torch.arange(tokens - count, tokens)[:, None]
        mask = torch.arange(tokens) <= queries
        if layer == 1 and self.window is not None:
            mask &= torch.arange(tokens) > queries - self.window
        wanted, _ = attention_twin(query[None], *seen, scaling=0.25, mask=mask)
        torch.testing.assert_close(out, wanted[0].transpose(0, 1), atol=1e-5, rtol=1e-5)

    def step(self) -> None:
        memory, paths = self.memory, [path for path, _ in self.beams]
        self.groups.append(memory.begin_step(paths, STEP))
        assert sorted(i for group in self.groups[-1] for i in group) == list(range(len(paths)))
        for index, group in enumerate(self.groups[-1]):
            memory.begin_group(index)
            self.run_group(group)
        self.loaded_blocks.append(memory.end_step().loaded_bytes // memory.shape.block_bytes)
        kept = self.draw.sample(self.beams, BEAMS // WIDTH)
        forks = [(memory.fork(path), list(past)) for path, past in kept for _ in range(WIDTH)]
        for path, _ in self.beams:
            memory.release(path)
        self.beams = forks

    def run_group(self, group: Sequence[int]) -> None:
        memory, ends = self.memory, [self.draw.randint(1, STEP) for _ in group]
        lengths = [self.beams[i][0].length for i in group]
        for step in range(STEP):
            active = [step < end for end in ends]
            torch.add(memory.group.lengths, 1, out=memory.group.places)
            memory.group.lengths.add_(torch.tensor(active, dtype=torch.int32))
            for layer in range(LAYERS):
                call = self.call(len(group), 1)
                out = memory.attend(layer, call)
                for row, i in enumerate(group):
                    if active[row]:
                        past = self.beams[i][1]
                        past[layer] = self.joined(past[layer], call, row)
                        self.check(layer, out[row], call.query[row], past[layer])
            lengths = [n + one for n, one in zip(lengths, active, strict=True)]
            memory.token_done(lengths)
        memory.end_group(lengths)

    def end(self) -> None:
        for path, _ in self.beams:
            self.memory.release(path)
        assert self.memory.tree.num_blocks == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "inter-token": {"overlap": False, "prefetch": False},
    "inter-beam": {"prefetch": False},
    "prefetch": {},
    "share": {"share": True},
    "share-in-order": {"share": True, "overlap": False, "balance": False},
}


@pytest.mark.parametrize(
    ("name", "num_slots", "window"), covering(list(OPTIONS), [25, 35, 110], [None, 9])
)
def test_scheduled_equals_plain_attention(name: str, num_slots: int, window: int | None) -> None:
    memory = scheduled(block_shape(window), num_slots, **OPTIONS[name])
    search = Search(memory, seed=num_slots)
    for _ in range(3):
        search.step()
    search.end()
    assert not [*memory._fast.resident()]
    assert memory._fast.num_free == num_slots
    memory.close()
    counts = [len(groups) for groups in search.groups]
    assert max(counts) > 1 or num_slots == 110
    if num_slots == 110:
        assert counts == [1] * 3
        assert search.loaded_blocks == [0] * 3, "nothing moves while everything fits"
    elif name == "inter-token":
        assert sum(search.loaded_blocks) > 0


@pytest.mark.parametrize(("resident", "window"), [(16, None), (16, 9), (90, 9), (400, None)])
def test_layerwise_equals_plain_attention(resident: int, window: int | None) -> None:
    memory = layerwise(block_shape(window), resident)
    search = Search(memory, seed=resident)
    for _ in range(3):
        search.step()
    search.end()
    assert sorted(memory._free) == list(range(resident))
    memory.close()
    assert (sum(search.loaded_blocks) == 0) == (resident == 400)


def test_shared_blocks_are_loaded_once_and_take_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "check", lambda *_: None)  # above; here only what is loaded counts
    loaded = {}
    for name in ("inter-token", "inter-beam", "prefetch", "share"):
        memory = scheduled(block_shape(None), 45, **OPTIONS[name])
        search = Search(memory, seed=3)
        for _ in range(4):
            search.step()
        loaded[name] = sum(search.loaded_blocks), sum(len(groups) for groups in search.groups)
        memory.close()
    assert loaded["inter-beam"][0] * 2 <= loaded["inter-token"][0]
    assert loaded["share"][1] < loaded["inter-beam"][1], "more beams fit"
    assert loaded["prefetch"][0] <= 1.1 * loaded["inter-beam"][0]


def test_groups_shrink_when_the_system_has_less_to_spare() -> None:
    spare = [1 << 30]
    shape = block_shape(None)
    memory = scheduled(shape, 110, spare_bytes=lambda: spare[0])
    search = Search(memory, seed=5)
    search.step()
    spare[0] = -60 * 4096
    search.step()
    spare[0] = 1 << 30
    search.step()
    memory.close()
    assert len(search.groups[0]) == 1
    assert len(search.groups[1]) > 1, "the second step must do with less"
    assert len(search.groups[2]) == 1, "and the third has it back"
