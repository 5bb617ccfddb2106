"""The tuning task: its grid, its budgets, what is run at a spot, and what is refused."""

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, UnsupportedModelError
from penstock.devices.presets import PRESETS
from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.native.compiled import kernel
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.query_projection import decoder_layers
from penstock.storage.measured_directory import MIN_FILE_BYTES
from penstock.testing.tiny_models import tiny_model
from penstock.tuner import tuning_task
from penstock.tuner.text_document import TextDocument
from penstock.tuner.tuning_task import (
    MOST_BATCHES,
    TuningTask,
    choice_of_points,
    device_of,
    grid,
    require_sizes,
    require_tunable,
)
from penstock.workloads.prefilled import PrefilledText
from penstock.workloads.selection_streams import OverlapStream
from penstock.workloads.synthetic_kv import SyntheticKV

MakeTask = Callable[..., TuningTask]


# The grid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("smallest", [1, 3, 1024, 4096])
@pytest.mark.parametrize("largest", [1, 5, 1024, 4095, 4096, 10_000, 32_768])
def test_a_grid_halves_down_to_the_smallest(largest: int, smallest: int) -> None:
    found = grid(largest, smallest)
    assert found[-1] == largest
    assert all(before == after // 2 for before, after in pairwise(found))
    assert min(found[:-1], default=smallest) >= smallest
    assert found[0] // 2 < smallest, "and no further"


def test_grids() -> None:
    assert grid(16_384, 4096) == [4096, 8192, 16_384]
    assert grid(10_000, 4096) == [5000, 10_000]
    assert grid(3000, 4096) == [3000]
    assert grid(6, 1) == [1, 3, 6]


def test_the_tasks_grid(make_task: MakeTask) -> None:
    task = make_task(max_context=16_384, max_batch=4)
    assert task.contexts == [4096, 8192, 16_384]
    assert task.batches == [1, 2, 3, 4], "steps of one, as in the paper"
    assert task.corners == [(1, 4096), (1, 16_384), (4, 4096), (4, 16_384)]
    assert make_task(max_context=2048, max_batch=1).corners == [(1, 2048)]
    many = make_task(max_batch=4 * MOST_BATCHES)
    assert many.batches == [1, 2, 4, 8, 16, 32]
    assert {batch for batch, _ in many.corners} == {1, 32}


def test_each_sequence_has_its_share_of_the_budget(make_task: MakeTask) -> None:
    task = make_task(max_batch=3, limit_bytes=1000)
    assert [task.limit_for(batch) for batch in (1, 2, 3)] == [333, 666, 1000]


# What is run ------------------------------------------------------------------------------------


def test_a_real_text_where_it_is_long_enough(make_task: MakeTask, tiny: LoadedModel) -> None:
    draw = torch.Generator().manual_seed(0)
    text = PrefilledText(tiny.model, torch.randint(0, 512, (1, 1000), generator=draw))
    task = make_task(text=text)
    for context, is_text in ((1048, True), (1100, True), (1101, False), (600, True)):
        work = task.workpiece(2, context)
        assert isinstance(work.document, TextDocument if is_text else SyntheticKV)
        assert work.max_tokens == context
        assert work.context == (min(1000, context - 48) if is_text else context - 48)
        assert work.batch == 2
        expected = None if is_text else OverlapStream(overlap=0.77)
        assert work.stream == expected, "noise has no overlap of its own"
    assert isinstance(make_task().workpiece(1, 600).document, SyntheticKV)


def test_noise_is_the_same_for_all(make_task: MakeTask) -> None:
    documents = [make_task().workpiece(2, 600).document for _ in range(2)]
    chunks = []
    for document in documents:
        assert isinstance(document, SyntheticKV)
        chunks.append([part.clone() for part in document.chunk(100)])
    assert torch.equal(chunks[0][0], chunks[1][0])
    assert chunks[0][0].shape == (2, 2, 100, 64)


@pytest.mark.parametrize("is_fast", [None, True, False], ids=["here", "compiled", "plain"])
def test_a_seat_knows_what_is_not_predicted(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, is_fast: bool | None
) -> None:
    """Layers 1 and 2 are predicted, from copies of their weights where a kernel reads those."""
    if is_fast is not None:
        monkeypatch.setattr(Int8Linear, "is_fast", lambda weight: is_fast)
    task = make_task()
    assert task.adapter is not None
    adapter = type(task.adapter)(task.adapter.layers, task.adapter.fingerprint, 0, (1, 0.2, 1))
    seat = make_task(adapter=adapter).seat(KVSwap())
    assert seat.true_query_layers == {1}
    assert seat.has_adapter
    linear = decoder_layers(task.model)[1].get_submodule("self_attn.q_proj")
    assert isinstance(linear, torch.nn.Linear)
    is_copied = Int8Linear.is_fast(linear.weight)
    copy = Int8Linear.num_bytes(linear.weight, linear.bias) if is_copied else 0
    assert is_copied == (kernel("int8_linear") is not None if is_fast is None else is_fast)
    assert seat.predictor_bytes == copy, "of layer 2"
    assert task.seat(KVSwap()).predictor_bytes == 2 * copy
    assert make_task(adapter=None).seat(KVSwap()).has_adapter is False
    assert task.seat(KVSwap(predict=False)).predictor_bytes == 0


# The disk ---------------------------------------------------------------------------------------


def test_the_device_of_a_store(tmp_path: Path) -> None:
    for name, profile in PRESETS.items():
        assert device_of(name) is profile
        assert device_of(f"{name}:{tmp_path}") is profile
    memory = device_of("memory")
    assert memory.steady_read_time_s(1000, 1 << 20) < 1e-5


def test_a_directory_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_task, "MOST_MEASURED_BYTES", MIN_FILE_BYTES)
    found = device_of(str(tmp_path))
    assert found.name == "real"
    assert found.bandwidth > 1e6
    assert found.iops > 10
    assert found.flash_page_bytes == found.sector_bytes
    assert found.sector_bytes in (512, 4096)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="needs a directory"):
        device_of(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="there is no directory"):
        device_of("/proc/none/here")


# Refusals ---------------------------------------------------------------------------------------


def test_models_that_cannot_be_tuned() -> None:
    shape = require_tunable(tiny_model("qwen3"))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 16)
    for family in ("gemma2", "gemma3"):
        with pytest.raises(UnsupportedModelError, match="sliding-window"):
            require_tunable(tiny_model(family))


def test_sizes_that_make_no_sense() -> None:
    require_sizes(1024, 1)
    for context, batch in ((1023, 1), (0, 1), (-5, 4), (4096, 0), (4096, -1)):
        with pytest.raises(ConfigError, match="at least 1024"):
            require_sizes(context, batch)


# Points that lie far apart ----------------------------------------------------------------------


def distances(points: list[list[float]]) -> NDArray[np.float64]:
    """Sums of differences, each feature by its range. [points, points]"""
    values = np.array(points)
    values = values / np.maximum(values.max(0) - values.min(0), 1e-9)
    return np.asarray(np.abs(values[:, None] - values[None]).sum(-1), dtype=np.float64)


@pytest.mark.parametrize("seed", range(10))
def test_each_point_is_the_farthest_from_those_before(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = (draw.normal(size=(40, 3)) * [1.0, 1e6, 1e-3]).tolist()
    taken = choice_of_points(points, 9)
    assert taken[0] == 0
    assert len(set(taken)) == 9
    apart = distances(points)
    for number in range(1, 9):
        nearest = apart[:, taken[:number]].min(axis=1)
        assert nearest[taken[number]] == pytest.approx(nearest.max())


def test_the_choice_is_at_most_twice_as_dense_as_the_best() -> None:
    """Gonzalez: farthest first is within a factor of two of the best spread, by brute force."""
    draw = np.random.default_rng(3)
    points = draw.uniform(size=(12, 2)).tolist()
    apart = distances(points)

    def closest(taken: tuple[int, ...]) -> float:
        return float(min(apart[a, b] for a, b in combinations(taken, 2)))

    best = max(closest(each) for each in combinations(range(12), 4))
    assert closest(tuple(choice_of_points(points, 4))) >= best / 2


def test_few_points_are_all_taken_and_none_twice() -> None:
    assert sorted(choice_of_points([[1.0], [2.0], [3.0]], 8)) == [0, 1, 2]
    assert choice_of_points([[1.0, 2.0]], 3) == [0]
    assert choice_of_points([[5.0], [6.0]], 1) == [0]
    same = choice_of_points([[1.0, 7.0], [1.0, 7.0], [2.0, 7.0], [1.0, 7.0]], 4)
    assert sorted(same) == [0, 1, 2, 3], "settings that look alike are still different ones"


def test_a_feature_without_any_range_does_not_hide_the_others() -> None:
    assert choice_of_points([[1.0, 0.0], [1.0, 5.0], [1.0, 1.0]], 2) == [0, 1]


def test_no_more_caches_are_open_than_memory_holds(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = make_task(max_batch=2, max_context=2048)
    whole = inspect_model(task.model).kv.full_cache_bytes(2, 2048)
    each = task.limit_bytes + whole

    def has(free: int) -> None:
        memory = type("Memory", (), {"available": free})
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

    has(2 * 3 * each)
    assert task.most_open(2, 2048) == 3
    assert task.most_open(1, 2048) == 6
    has(each)
    assert task.most_open(2, 2048) == 1, "one must do"
    on_disk = make_task(max_batch=2, max_context=2048, store=str(tmp_path))
    has(2 * 5 * task.limit_bytes)
    usage = type("Usage", (), {"free": 2 * 4 * whole})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    assert on_disk.most_open(2, 2048) == 4, "the whole KV of each is on the disk"


def test_a_folder_under_home_is_found(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "kv").mkdir()
    for store in ("~/kv", "nvme:~/kv"):
        assert make_task(store=store).most_open(1, 2048) >= 1
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path}/none"):
        make_task(store="~/none").most_open(1, 2048)


def test_the_disk_that_auto_leads_to_is_asked_for_its_room(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[str]()

    def usage(place: str) -> object:
        asked.append(place)
        return type("Usage", (), {"free": 1 << 40})

    monkeypatch.setattr(tuning_task, "find_directory", lambda place: f"where {place} leads")
    monkeypatch.setattr("shutil.disk_usage", usage)
    make_task(store="auto").most_open(1, 2048)
    assert asked == ["where auto leads"]
