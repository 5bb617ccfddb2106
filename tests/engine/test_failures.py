"""Reads and writes that fail, at any moment: a typed error, nothing hangs, close() works."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import CacheStateError, FetchError, StorageError, StoreFullError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import FlexGen, KVSwap, SelectionPolicy
from penstock.storage.memory_file import MemoryFile
from penstock.storage.store import KVStore, Sealing
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.pairs import covering
from tests.ready_process import ReadyProcess

SHAPE = KVShape(num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
EVERY = range(1 << 20)
SMALL: dict[str, Any] = {"window_tokens": 4, "rank": 4, "selected_tokens": 12}
POLICIES: dict[str, tuple[SelectionPolicy, dict[str, Any]]] = {
    "direct": (KVSwap(**SMALL), {"limit_bytes": 1 << 22}),
    "staged": (KVSwap(group_tokens=3, **SMALL), {"limit_bytes": 1 << 22}),
    "shared": (KVSwap(reuse_tokens=0, **SMALL), {"limit_bytes": 1 << 22}),
    "shared-staged": (KVSwap(group_tokens=3, reuse_tokens=0, **SMALL), {"limit_bytes": 1 << 22}),
    "exact": (KVSwap(**SMALL), {"exact": True}),
    "exact-staged": (KVSwap(group_tokens=3, **SMALL), {"exact": True}),
    "flexgen": (FlexGen(group_tokens=8), {}),
}
FULL_DISK = """
import resource, sys, torch
from penstock.core.errors import CacheStateError, StoreFullError
from penstock.core.shape import KVShape
from penstock.methods import KVSwap
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
shape = KVShape(
    num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
for prompt_tokens in (400, 30):  # the prompt is too long, or the answer
    runtime = TieredRuntime(RuntimeSettings(
        shape=shape, policy=KVSwap(window_tokens=8, selected_tokens=16, rank=4),
        limit_bytes=1 << 22, store=sys.argv[1], max_tokens=500, exact=False, adapter=None,
        device=torch.device("cpu"),
    ), 1)
    def step(count):
        for layer in range(3):
            keys = torch.randn(1, 2, count, 16)
            runtime.attend(layer, AttentionCall(torch.randn(1, 4, count, 16), keys, keys, 0.25))
    try:
        step(prompt_tokens)
        for _ in range(400):
            step(1)
    except StoreFullError as error:
        print("full")
    try:
        step(1)
    except CacheStateError as error:
        print("lost" if "reset()" in str(error) else error)
    runtime.reset()
    step(20)
    for _ in range(20):
        step(1)
    print(runtime.length)
    runtime.close()
"""


class Rig:
    """A runtime over faulty files, one a layer."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = [FaultyFile(MemoryFile()) for _ in range(SHAPE.num_layers)]

        def create(
            _: str, *, num_layers: int, unit_bytes: int, sealed: Sealing, sector_bytes: int | None
        ) -> KVStore:  # fmt: skip
            assert sealed == "auto"
            assert sector_bytes is None

            def close() -> None:
                for file in self.files:
                    file.close()

            return KVStore(self.files, unit_bytes, "faulty files", close)

        monkeypatch.setattr(KVStore, "create", create)
        policy, options = POLICIES[name]
        settings: dict[str, Any] = {
            "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
            "max_tokens": 200, "exact": False, "adapter": None, "device": torch.device("cpu"),
        }  # fmt: skip
        self.runtime = TieredRuntime(RuntimeSettings(**{**settings, **options}), 2)

    def step(self, count: int, predict: bool = False) -> None:
        for layer in range(SHAPE.num_layers):
            following = layer + 1
            predict = predict and following < SHAPE.num_layers
            if predict and self.runtime.wants_query(following):
                self.runtime.begin_fetch(following, torch.randn(2, 4, 16))
            query, keys = torch.randn(2, 4, count, 16), torch.randn(2, 2, count, 16)
            self.runtime.attend(layer, AttentionCall(query, keys, keys.clone(), 0.25))

    def steps(self, count: int, predict: bool = False) -> None:
        """Decode, at most `count` tokens."""
        for _ in range(count):
            self.step(1, predict)

    def fail_reads(self, layer: int, numbers: Any = EVERY) -> None:
        self.files[layer].failing_reads = numbers


@pytest.fixture(params=POLICIES)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    torch.manual_seed(0)
    rig = Rig(request.param, monkeypatch)
    yield rig
    rig.runtime.close()
    rig.runtime.close()


@pytest.mark.parametrize(
    ("rig", "layer", "predict"),
    covering(list(POLICIES), range(SHAPE.num_layers), [False, True]),
    indirect=["rig"],
)
def test_failing_reads_in_decode(rig: Rig, layer: int, predict: bool) -> None:
    """The step raises; going on is refused until the cache is cropped or reset; then it works."""
    rig.step(60)
    for _ in range(5):
        rig.step(1, predict)
    length = rig.runtime.length
    rig.fail_reads(layer)
    for _ in range(4):  # more often than there are staging sections
        with pytest.raises(FetchError, match="on purpose"):
            rig.steps(50, predict)
        with pytest.raises(CacheStateError, match="crop"):
            rig.step(1)
        rig.fail_reads(layer, ())
        rig.runtime.crop(length)
        rig.step(1)
        rig.runtime.crop(length)
        rig.fail_reads(layer)
    rig.fail_reads(layer, ())
    rig.runtime.reset()
    rig.step(60)
    rig.step(1, predict)


def test_failing_reads_in_prefill(rig: Rig) -> None:
    rig.step(60)
    rig.fail_reads(1)
    with pytest.raises(FetchError, match="on purpose"):
        rig.step(20)
    assert rig.runtime.layer_length(0) == 80
    assert rig.runtime.layer_length(2) == 60
    rig.fail_reads(1, ())
    with pytest.raises(CacheStateError, match="halfway"):
        rig.step(20)
    rig.runtime.crop(60)
    rig.step(20)
    assert rig.runtime.layer_length(2) == 80


def test_failing_reads_in_crop(rig: Rig) -> None:
    rig.step(60)
    for layer in range(SHAPE.num_layers):
        rig.fail_reads(layer)
    with pytest.raises(FetchError):
        rig.runtime.crop(20)
    with pytest.raises(CacheStateError, match="halfway"):
        rig.step(1)


def test_close_with_a_failing_fetch_under_way(rig: Rig) -> None:
    rig.step(60)
    rig.step(1)
    for layer in range(SHAPE.num_layers):
        rig.fail_reads(layer)
        if rig.runtime.wants_query(layer):
            rig.runtime.begin_fetch(layer, torch.randn(2, 4, 16))
            break
    rig.runtime.close()
    with pytest.raises(CacheStateError, match="closed"):
        rig.step(1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_full_disk(rig: Rig, phase: str) -> None:
    rig.step(40)
    for file in rig.files[1:]:
        file.failing_writes = EVERY
    with pytest.raises(StoreFullError, match="no room"):
        rig.step(60) if phase == "prefill" else rig.steps(60)
    with pytest.raises(CacheStateError, match=r"reset\(\)"):
        rig.step(1)
    with contextlib.suppress(StoreFullError):  # of a write that nobody had waited for yet
        rig.runtime.crop(4)
    with pytest.raises(CacheStateError, match=r"reset\(\)"):
        rig.step(1)
    for file in rig.files:
        file.failing_writes = ()
    rig.runtime.reset()
    rig.step(40)
    rig.step(1)


def test_a_fork_that_finds_the_disk_full(rig: Rig) -> None:
    rig.step(40)
    for file in rig.files:
        file.failing_writes = EVERY

    def reorder_on(steps: int) -> None:
        for _ in range(steps):
            rig.step(1)
            rig.runtime.select_rows(torch.tensor([1, 0]))

    with pytest.raises(StorageError):
        reorder_on(60)


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    """Real files that may not grow: the error reaches the caller of the model."""
    with ReadyProcess(FULL_DISK, str(tmp_path)) as run:
        assert run.stdout.read().split() == ["full", "lost", "40"] * 2, run.errors()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [0, 1])  # while it is fitted, and while units are taken in
@pytest.mark.parametrize("name", ["direct", "staged", "shared"])
def test_an_index_that_was_made_in_part_is_made_anew(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose index could not be made whole, cropped and repeated, answers as if it could."""

    def answers(failing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        rig = Rig(name, monkeypatch)
        rig.step(150)
        file = rig.files[-1]
        if failing:
            file.failing_reads = {file.num_reads + number}
            state = torch.random.get_rng_state()
            with pytest.raises(FetchError, match="on purpose"):
                rig.step(1)
            torch.random.set_rng_state(state)
            rig.runtime.crop(150)
        found = []
        for _ in range(8):
            rig.step(1)
            query, keys = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
            for layer in range(SHAPE.num_layers):
                out = rig.runtime.attend(layer, AttentionCall(query, keys, keys.clone(), 0.25))
                found.append(out)
        rig.runtime.close()
        return found

    for ours, theirs in zip(answers(True), answers(False), strict=True):
        torch.testing.assert_close(ours, theirs)
