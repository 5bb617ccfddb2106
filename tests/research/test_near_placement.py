"""Traffic between hot and cold pools: against sets and plain softmax, and as a program."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.result import Result
from research.clusters.recording import KeyStream
from research.figures import near_storage
from research.figures.chart import draw
from research.near_storage import program
from research.near_storage.placement import (
    IMPORTANT,
    RULES,
    UNIMPORTANT,
    Clairvoyant,
    Pools,
    best,
    best_count,
    importance_steps,
    measure_placement,
    measure_premises,
    settings_of,
    tiers_of,
)
from research.near_storage.program import times_less
from tests.research.drawn_figures import figures_drawn

PROMPT, OUTPUT = 60, 24
SMALL = [
    "placement",
    "--task=ring_walk",
    "--prompt=200",
    "--max-new-tokens=30",
    "--hot=0.4,0.6",
    "--decay=0,4",
    "--short=64",
]


def random_stream(
    seed: int = 0, *, heads: int = 2, each: int = 2, layers: int = 2, prompt: int = PROMPT
) -> KeyStream:  # fmt: skip
    """Keys and queries that mean nothing, but are sharp enough to choose."""
    draw = torch.Generator().manual_seed(seed)
    total = prompt + OUTPUT
    return KeyStream(
        prompt_tokens=prompt, scaling=[0.5] * layers, layers=tuple(range(layers)), expected=1.0,
        keys=[torch.randn(heads, total, 8, generator=draw) for _ in range(layers)],
        queries=[torch.randn(heads * each, total, 8, generator=draw) for _ in range(layers)],
    )  # fmt: skip


def all_steps(stream: KeyStream, layer: int = 0) -> list[Any]:
    return [step.importance for step in importance_steps(stream, layer)]


def test_importance_is_the_column_sum_of_attention() -> None:
    stream = random_stream()
    steps = list(importance_steps(stream, 1))
    assert [step.length for step in steps] == list(range(PROMPT, PROMPT + OUTPUT))
    for step in steps:
        keys = stream.keys[1].repeat_interleave(2, dim=0)[:, : step.length + 1]
        query = stream.queries[1][:, step.length, None]
        shares = (query @ keys.transpose(1, 2) * 0.5).softmax(dim=-1).sum(dim=(0, 1))
        assert step.importance == pytest.approx(shares[:-1].numpy(), abs=1e-5)
        assert step.importance.sum() < 4.0


def test_shares_of_the_past() -> None:
    assert [best_count(share, 10) for share in (0.01, 0.2, 0.21, 1.0)] == [1, 2, 3, 10]
    assert best_count(0.6, 5) == 3
    found = best(np.array([0.5, 3.0, 1.0, 2.0], dtype=np.float32), 2)
    assert sorted(found.tolist()) == [1, 3]
    assert best(np.zeros(3, dtype=np.float32), 5).tolist() == [0, 1, 2]


@pytest.mark.parametrize("hot_share", [0.2, 0.5])
def test_naive_pools_hold_the_steps_best_tokens(hot_share: float) -> None:
    stream = random_stream(3)
    pools = Pools(
        RULES["naive"], hot_share=hot_share, alpha=0.2, prompt=PROMPT, total=PROMPT + OUTPUT
    )
    before = set(pools.hot.nonzero()[0].tolist())
    assert before == set(range(PROMPT - best_count(hot_share, PROMPT), PROMPT))
    for number, importance in enumerate(all_steps(stream)):
        length = PROMPT + number
        after = set(np.argsort(importance)[-best_count(hot_share, length) :].tolist())
        selected = best(importance, best_count(0.2, length))
        moved = pools.step(importance, selected)
        born = {length - 1} if number else set()
        assert set(pools.hot.nonzero()[0].tolist()) == after
        assert moved.promoted == len(after - before - born)
        assert moved.demoted == len((before | born) - after)
        assert moved.hot_selected == len(set(selected.tolist()) & (before | born))
        assert moved.passed_through == 0
        before = after


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 10**6), rule=st.sampled_from(list(RULES)),
    sizes=st.sampled_from([(0.2, 0.2), (0.3, 0.1), (0.6, 0.2)]),
)  # fmt: skip
def test_pools_keep_their_size_and_count_what_they_move(
    seed: int, rule: str, sizes: tuple[float, float]
) -> None:
    hot_share, alpha = sizes
    pools = Pools(
        RULES[rule], hot_share=hot_share, alpha=alpha, prompt=PROMPT, total=PROMPT + OUTPUT
    )
    never_cold = set(pools.hot.nonzero()[0].tolist())
    before = set(never_cold)
    for number, importance in enumerate(all_steps(random_stream(seed))):
        length = PROMPT + number
        selected = best(importance, best_count(alpha, length))
        moved = pools.step(importance, selected)
        born = {length - 1} if number else set()
        after = set(pools.hot.nonzero()[0].tolist())
        room = best_count(hot_share, length)
        kept = set(selected.tolist()) if not RULES[rule].follows_score else set()
        assert kept <= after
        assert len(after) <= max(room, len(kept | born))
        assert moved.promoted == len(after - before - born)
        assert moved.demoted == len((before | born) - after)
        assert moved.passed_through == len(set(selected.tolist()) - after - before)
        never_cold |= born
        assert moved.demoted_first == len(never_cold - after)
        never_cold &= after
        if rule == "both" and number and room > len(kept) + best_count(alpha, length):
            assert set(range(length - best_count(alpha, length), length)) <= after
        before = after


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), sizes=st.sampled_from([(0.2, 0.2), (0.3, 0.1), (0.5, 0.2)]))
def test_no_choice_of_victims_beats_the_future(seed: int, sizes: tuple[float, float]) -> None:
    hot_share, alpha = sizes
    total = PROMPT + OUTPUT
    steps = all_steps(random_stream(seed))
    chosen = [best(one, best_count(alpha, len(one))) for one in steps]
    ahead = Clairvoyant(chosen, hot_share=hot_share, prompt=PROMPT, total=total)
    fewest = sum(ahead.step(number, PROMPT + number) for number in range(OUTPUT))
    for rule in ("selected", "table", "both"):
        pools = Pools(RULES[rule], hot_share=hot_share, alpha=alpha, prompt=PROMPT, total=total)
        moved = [pools.step(one, mine) for one, mine in zip(steps, chosen, strict=True)]
        assert fewest <= sum(one.promoted for one in moved)


def test_clairvoyant_against_all_choices() -> None:
    """Four tokens and a pool of two, one selected a step: every sequence of victims is tried."""
    for wanted in itertools.product(range(4), repeat=5):
        ahead = Clairvoyant([np.array([one]) for one in wanted], hot_share=0.5, prompt=4, total=4)
        found = sum(ahead.step(number, 4) for number in range(5))

        def fewest(held: frozenset[int], rest: tuple[int, ...]) -> int:
            if not rest:
                return 0
            if rest[0] in held:
                return fewest(held, rest[1:])
            kept = [frozenset({one, rest[0]}) for one in held]
            return 1 + min(fewest(pool, rest[1:]) for pool in kept)

        assert found == fewest(frozenset({2, 3}), wanted)


def test_rows_are_what_the_pools_moved() -> None:
    stream = random_stream(5)
    plans = settings_of([0.1, 0.4], [0.2], ["naive", "both"])
    assert [(one.hot_share, one.name) for one in plans] == [(0.4, "naive"), (0.4, "both")]
    done: list[int] = []
    rows = measure_placement(stream, plans, token_bytes=100, on_layer=done.append)
    assert done == [1, 2]
    for plan, row in zip(plans, rows, strict=True):
        promoted = []
        for layer in range(2):
            pools = Pools(plan.rule, hot_share=0.4, alpha=0.2, prompt=PROMPT, total=PROMPT + OUTPUT)
            steps = all_steps(stream, layer)
            promoted.append([pools.step(x, best(x, best_count(0.2, len(x)))).promoted
                             for x in steps])  # fmt: skip
        counts = np.array(promoted)
        assert row["promoted"]["mean"] == pytest.approx(counts.mean(), abs=1e-3)
        assert row["promoted"]["p95"] == pytest.approx(np.percentile(counts, 95), abs=1e-3)
        assert row["promoted_of_layer"] == pytest.approx(counts.mean(axis=1), abs=0.01)
        assert row["promoted_later"]["mean"] == pytest.approx(counts[:, 16:].mean(), abs=1e-3)
        both = row["promoted"]["mean"] + row["demoted"]["mean"] + row["passed_through"]
        assert row["moved_bytes"] == pytest.approx(100 * both, abs=1)
        assert row["sent_bytes"] == pytest.approx(100 * (row["promoted"]["mean"] + 1), abs=1)
    assert rows[1]["clairvoyant"]["mean"] <= rows[1]["promoted"]["mean"]
    assert times_less(rows, rows[0], "moved_bytes_later") == 1.0
    assert times_less(rows, rows[1], "moved_bytes_later") > 1.0


def test_tiers_and_what_leaves_them() -> None:
    tiers = tiers_of(np.arange(10, dtype=np.float32))
    assert (tiers == UNIMPORTANT).nonzero()[0].tolist() == [0, 1]
    assert (tiers == IMPORTANT).nonzero()[0].tolist() == [8, 9]
    stream = random_stream(1)
    found = measure_premises(stream)
    counts = np.array(found["counts"])
    assert counts.sum(axis=1).tolist() == [2 * OUTPUT] * PROMPT + [
        2 * (OUTPUT - 1 - place) for place in range(OUTPUT)
    ]
    assert sum(found["important_shares"]["prompt"]) == pytest.approx(1.0, abs=1e-3)
    assert found["chance_storage"] == 0.32
    assert found["chance_any"] == 0.56
    # Random queries: ranks have little to do with those of the step before.
    assert np.mean(found["moved_storage"]) == pytest.approx(0.32, abs=0.06)
    assert np.mean(found["moved_any"]) == pytest.approx(0.56, abs=0.08)
    still = KeyStream(
        prompt_tokens=PROMPT, scaling=[0.5], layers=(0,), expected=1.0, keys=stream.keys[:1],
        queries=[stream.queries[0][:, :1].expand(-1, PROMPT + OUTPUT, -1)],
    )  # fmt: skip
    calm = measure_premises(still)
    assert np.mean(calm["moved_any"]) < 0.05
    assert calm["often_important"] > found["often_important"]


@pytest.fixture(scope="module")
def result_file(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("near") / "near-placement-small.json"
    program.run([*SMALL, f"--model={shallow}", f"--out={out}"])
    return out


def test_a_run(result_file: Path, tmp_path: Path) -> None:
    document = json.loads(result_file.read_text())
    assert document["kind"] == "near_storage.placement"
    assert document["command"].startswith("python -m research.near_storage placement --task")
    found = document["figures"]
    assert (found["model"], found["output"], found["output_tokens"]) == ("shallow", "ring_walk", 30)
    assert found["token_bytes"] == 2 * 4 * 64 * 2
    rows = [(row["hot_share"], row["alpha"], row["rule"]) for row in found["rows"]]
    assert rows == list(itertools.product((0.4, 0.6), (0.1, 0.2), RULES))
    assert all(len(row["promoted_of_step"]) == 30 for row in found["rows"])
    assert [row["decay_steps"] for row in found["decay"]] == [0, 4]
    assert found["short_premises"]["output_tokens"] == 32
    names = figures_drawn(result_file)
    assert names == ["near-placement-small", "near-placement-small-counts"]


def test_tables_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the sky is blue . the grass is green . " * 60)
    result = program.run(
        ["placement", "--text", str(path), "--prompt=100", "--max-new-tokens=20", "--hot=0.5",
         "--decay=", "--alphas=0.2", "--json"]
    )  # fmt: skip
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == result.as_dict()
    assert str(path) not in last
    text = "\n".join(lines)
    assert "20% to 50%" in text
    assert f"{result.figures['rows'][0]['read_later']:,.1f}" in text
    assert "halved" not in text
    assert len(draw(near_storage.placement(result)).axes) == 4
    empty = Result.begin("near_storage", [], {}, seed=0)
    with pytest.raises(ConfigError, match="no rules"):
        draw(near_storage.placement(empty))
    with pytest.raises(ConfigError, match="no premises"):
        draw(near_storage.counts(empty))
    for arguments, why in (
        (["--hot=0.1", "--alphas=0.2"], "must hold"), (["--hot=2"], "at most 1"),
        (["--hot=x"], "takes numbers"), (["--decay=x"], "takes numbers"),
        (["--decay=-1"], "from 0 on"), (["--short=3"], "at least 16"), (["--pool=0"], "above 0"),
        (["--prompt=3"], "at least 16"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            program.run(["placement", *arguments])
    with pytest.raises(PromptError, match="cannot read text"):
        program.run(["placement", f"--text={tmp_path}/none.txt"])
