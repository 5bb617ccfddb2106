"""Recorded selections: written, read back, scaled onto other contexts, and played."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.evaluate import record_selections
from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter, random_model
from penstock.workloads.recorded_stream import (
    FORMAT,
    RecordedStream,
    Recorder,
    Recording,
    scaled_units,
)
from penstock.workloads.selection_streams import NOTHING, Step, StreamedIndex, streamed, units_of
from penstock.workloads.synthetic_kv import SyntheticKV

STEPS = 4
REPLACED = sorted(name for name, p in POLICIES.items() if p.retrieves and not p.drops)
Chosen = list[list[tuple[Step, NDArray[np.int64]]]]
"""Of each layer and step, what was asked for and the units. [rows, wanted]"""


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model("tiny", max_positions=16384)


def decode(
    model: CausalLM, policy: SelectionPolicy, context: int, *, steps: int = STEPS, batch: int = 1,
    memory: str = "1/2",
) -> Chosen:  # fmt: skip
    """Decode over a synthetic document with a streamed policy."""
    with TieredCache(
        model, policy, store="memory", max_tokens=context + 64, memory=memory, batch_size=batch,
        adapter=random_adapter(model) if policy.uses_adapter else None,
    ) as cache:  # fmt: skip
        SyntheticKV(inspect_model(model).kv, batch, torch.device("cpu")).fill(cache, context)
        chosen: Chosen = []
        for layer in cache.tiers.layers:
            watch(layer.index, chosen)  # type: ignore[attr-defined]
        ids = torch.ones((batch, 1), dtype=torch.int64)
        for _ in range(steps):
            with torch.no_grad():
                model(
                    ids, **cache_argument(model, cache),
                    position_ids=torch.full((batch, 1), cache.get_seq_length()),
                )  # fmt: skip
    return chosen


def watch(index: object, chosen: Chosen) -> None:
    assert isinstance(index, StreamedIndex)
    choose = index.stream.choose
    steps: list[tuple[Step, NDArray[np.int64]]] = []
    chosen.append(steps)

    def choose_and_tell(step: Step) -> Selection:
        selection = choose(step)
        steps.append((step, units_of(selection)))
        return selection

    vars(index.stream)["choose"] = choose_and_tell


def drifting(
    rows: int = 1, layers: int = 3, steps: int = STEPS, context: int = 2200, first: int = 20
) -> Recording:
    """100 groups of 4 tokens, four apart; each step and layer begins a little later."""
    units = first + 4 * np.arange(100) + 4 * np.arange(steps)[:, None, None, None]
    units = units + np.arange(layers)[:, None, None] + 2 * np.arange(rows)[:, None]
    shares = (units * 4 / context).astype(np.float32)
    return Recording(shares=shares, context=context, group_tokens=4, source={"model": "made up"})


def overlap(chosen: list[NDArray[np.int64]]) -> float:
    """Mean over steps and rows."""
    rows = [
        (a, b) for before, after in pairwise(chosen) for a, b in zip(before, after, strict=True)
    ]
    return float(np.mean([np.isin(b, a)[b != NOTHING].mean() for a, b in rows]))


# Recording --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kvswap", "quest", "h2o"])
def test_what_is_selected_is_recorded_and_nothing_changes(
    name: str, model: CausalLM, tmp_path: Path
) -> None:
    recorder = Recorder()
    chosen = decode(model, streamed(POLICIES[name](), recorder), 2200, batch=2)
    recording = recorder.recording({"model": "tiny", "policy": name})
    rows = 4 if POLICIES[name].per_head else 2
    assert recording.shares.shape[:3] == (STEPS, 3, rows)
    assert recording.context == 2200 // recording.group_tokens * recording.group_tokens
    recording.save(tmp_path / "in" / "a.npz")
    again = Recording.load(tmp_path / "in" / "a.npz")
    assert again.source == {"model": "tiny", "policy": name}
    assert (again.context, again.group_tokens) == (recording.context, recording.group_tokens)
    tokens = again.first_tokens
    for layer, steps in enumerate(chosen):
        for number, (_, units) in enumerate(steps):
            expected = np.where(units == NOTHING, NOTHING, units * again.group_tokens)
            found = tokens[number, layer, :, : units.shape[1]]
            assert found.tolist() == expected.tolist()
    about = json.loads(str(np.load(tmp_path / "in" / "a.npz")["about"]))
    measured = overlap([units for _, units in chosen[1]])
    assert about["overlap"]["by_layer"][1] == pytest.approx(measured)
    assert about["overlap"]["mean"] == pytest.approx(np.mean(about["overlap"]["by_layer"]))


def test_a_policy_that_selects_nothing_cannot_be_recorded(model: CausalLM) -> None:
    recorder = Recorder()
    with TieredCache(
        model, streamed(KVSwap(), recorder), store="memory", max_tokens=300,
        adapter=random_adapter(model),
    ):  # fmt: skip
        pass
    with pytest.raises(ConfigError, match="selected nothing"):
        recorder.recording({})


@pytest.mark.parametrize("content", [None, b"", b"not a zip", b"PK\x03\x04 broken"])
def test_what_is_no_recording_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="penstock bench record"):
        Recording.load(path)
    np.savez(path, shares=np.ones(3), about=np.array(json.dumps({"format": "else"})))
    with pytest.raises(ConfigError, match="holds no recorded selections"):
        Recording.load(path)
    np.save(tmp_path / "y.npy", np.ones(3))
    with pytest.raises(ConfigError, match="penstock bench record"):
        Recording.load(tmp_path / "y.npy")


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    path, draw = tmp_path / "x.npz", np.random.default_rng(0)
    shares = draw.random((20, 4, 2, 50)).astype(np.float32)
    Recording(shares=shares, context=1000, group_tokens=4).save(path)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), len(whole) // 300):
        content = bytearray(whole)
        content[place] ^= 0xFF
        path.write_bytes(content)
        try:
            Recording.load(path)
        except ConfigError:
            refused += 1
    assert refused > 250


@pytest.mark.parametrize(
    "spoilt",
    [
        {"context": None},
        {"context": 0},
        {"context": "x"},
        {"group_tokens": 0},
        {"source": 3},
        {"group_tokens": -4},
        {"context": float("inf")},
    ],
)
def test_a_recording_without_its_sizes_is_refused(spoilt: dict[str, Any], tmp_path: Path) -> None:
    path, shares = tmp_path / "x.npz", np.full((2, 1, 1, 3), 0.5, dtype=np.float32)
    about: dict[str, Any] = {"format": FORMAT, "context": 1000, "group_tokens": 4, "source": {}}
    np.savez(path, shares=shares, about=np.array(json.dumps(about)))
    assert Recording.load(path).context == 1000
    np.savez(path, shares=shares, about=np.array(json.dumps(about | spoilt)))
    with pytest.raises(ConfigError, match="recorded selections"):
        Recording.load(path)
    del about[next(iter(spoilt))]
    np.savez(path, shares=shares, about=np.array(json.dumps(about)))
    with pytest.raises(ConfigError, match="recorded selections"):
        Recording.load(path)


# Scaling ----------------------------------------------------------------------------------------


def scaled(
    tokens: list[int], recorded: int, size: int, context: int, group_tokens: int
) -> set[int]:
    places = np.array(tokens)[None, None]
    units = scaled_units(places, recorded, size, context=context, group_tokens=group_tokens)
    found = [int(unit) for unit in units[0, 0] if unit != NOTHING]
    assert len(found) == len(set(found))
    return set(found)


def test_units_keep_their_share_of_the_context() -> None:
    assert scaled([0, 400, 996], 1000, 4, 1000, 4) == {0, 100, 249}, "the same context: the same"
    assert scaled([0, 400, 996], 1000, 4, 4000, 4) == {0, 400, 996}, "of four times as much"
    assert scaled([0, 4, 8, 400], 1000, 4, 250, 4) == {0, 25}, "neighbours meet in a shorter one"
    assert scaled([0, 400], 1000, 4, 1000, 16) == {0, 25}, "larger units hold them"
    assert scaled([0, 400], 1000, 4, 1000, 1) == {0, 1, 2, 3, 400, 401, 402, 403}, "smaller cover"
    assert scaled([1000, 1008], 1000, 4, 4000, 4) == {1000, 1002}, "generated tokens come after"
    assert scaled([NOTHING, 400], 1000, 4, 1000, 4) == {100}


def test_fewer_units_are_the_same_ones_at_every_step() -> None:
    """Half of the places are enough here: the overlap of what is left is that of the whole."""
    draw = np.random.default_rng(0)
    steps = [draw.permutation(2000)[:200]]
    while len(steps) < 40:
        others = np.setdiff1d(np.arange(2000), steps[-1])
        steps.append(
            np.concatenate([draw.permutation(steps[-1])[:160], draw.permutation(others)[:40]])
        )
    tokens = 4 * np.sort(np.array(steps), axis=1)[:, None]
    units = scaled_units(tokens, 8000, 4, context=32000, group_tokens=4)
    assert overlap(list(units)) == pytest.approx(0.8)
    assert overlap(list(units[:, :, :100])) == pytest.approx(0.8, abs=0.05)


# Playing ----------------------------------------------------------------------------------------


def test_a_recording_plays_what_was_selected(model: CausalLM) -> None:
    """Recorded and played on the same context: the same units, there and back again."""
    recorder = Recorder()
    original = decode(model, streamed(KVSwap(), recorder), 2200, steps=4)
    stream = RecordedStream(recording=recorder.recording({}))
    played = decode(model, streamed(KVSwap(), stream), 2200, steps=9)
    for before, after in zip(original, played, strict=True):
        expected = [units.tolist() for _, units in before]
        assert [units.tolist() for _, units in after[:4]] == expected
        assert [units.tolist() for _, units in after[3:7]] == expected[::-1]
        assert [units.tolist() for _, units in after[6:]] == expected[:3]


def test_a_recording_plays_on_four_times_the_context(model: CausalLM) -> None:
    recording = drifting()
    stream = RecordedStream(recording=recording)
    chosen = decode(model, streamed(KVSwap(selected_tokens=400), stream), 8800)
    tokens = recording.first_tokens
    for layer, steps in enumerate(chosen):
        for number, (_, units) in enumerate(steps):
            assert (units * 4 // 4).tolist() == [sorted(tokens[number, layer, 0] * 4 // 4)]
        assert overlap([units for _, units in steps]) == pytest.approx(0.99)
    assert recording.statistics()["mean"] == pytest.approx(0.99)
    assert stream.describe() == "recorded (made up, 2200 tokens, 99 % overlap)"


@pytest.mark.parametrize("name", REPLACED)
def test_every_method_plays_a_recording(name: str, model: CausalLM) -> None:
    """Units of any size, rows of any number; the overlap stays where the recorded units suffice."""
    policy = streamed(POLICIES[name](), RecordedStream(recording=drifting(rows=2)))
    chosen = decode(model, policy, 3300, batch=2)
    assert len(chosen) == 3
    for steps in chosen:
        assert len(steps) == STEPS
        for step, units in steps:
            assert units.shape == (4 if policy.per_head else 2, step.wanted)
            assert (np.diff(units, axis=1) > 0).all(), "ascending and unique"
            assert (units >= step.first_unit[:, None]).all()
            assert (units < step.end_unit).all()
        for row in range(len(steps[0][1])):
            found = overlap([units[row : row + 1] for _, units in steps])
            assert found > 0.8, (row, found)


def test_what_is_missing_is_the_methods_own(model: CausalLM) -> None:
    """Half as many units as wanted are recorded, and some of those lie where none may be chosen."""
    recording = drifting(first=0)
    few = Recording(shares=recording.shares[..., :50], context=2200, group_tokens=4)
    chosen = decode(model, streamed(KVSwap(), RecordedStream(recording=few)), 2200)
    for layer, steps in enumerate(chosen):
        for number, (step, units) in enumerate(steps):
            recorded = set((few.first_tokens[number, layer, 0] // 4).tolist()) - {0}
            assert units.shape == (1, 100)
            assert recorded < set(units[0].tolist())
            assert units.min() >= step.first_unit[0] == 1


def test_more_layers_play_those_of_their_depth(model: CausalLM) -> None:
    two = drifting(layers=2)
    chosen = decode(model, streamed(KVSwap(), RecordedStream(recording=two)), 2200, steps=2)
    firsts = [int(steps[0][1][0, 0]) for steps in chosen]
    assert firsts == [20, 20, 21], "layers 0, 0 and 1 of two"


def test_a_run_on_the_bundled_model_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "r.npz"
    recording = record_selections.run([
        "--tokens=700", "--task=multi_key_few", "--steps=5", "--store=memory", f"--out={out}",
        "--policy=kvswap@1/3:selected_tokens=64", "--json",
    ])  # fmt: skip
    printed = capsys.readouterr().out.splitlines()
    assert recording.shares.shape == (5, 8, 1, 16)
    assert np.nanmin(recording.shares) >= 0
    assert np.nanmax(recording.shares) < 1.01
    assert Recording.load(out).source["task"] == "multi_key_few"
    assert str(tmp_path) not in json.dumps(recording.source)
    said = json.loads(printed[-1])
    assert said["overlap"]["mean"] == pytest.approx(np.mean(recording.overlaps()))
    assert "5 steps, 8 layers, rows: 1, 16 units of 4 tokens" in printed[0]
    assert len(said["overlap"]["by_layer"]) == 8


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--policy=full", "selected nothing"), ("--policy=kvsnap", "no policy"),
        ("--task=sums", "no task"), ("--steps=1", "--steps must be at least 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused(option: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        record_selections.run(
            ["--tokens=400", "--steps=2", "--store=memory", f"--out={tmp_path / 'r'}", option]
        )
    assert not (tmp_path / "r").exists()
