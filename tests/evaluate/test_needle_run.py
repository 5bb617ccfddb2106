"""The needle grid at toy size: who is asked what, where scores go, stopping and going on."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench import bench_app
from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate import needles
from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.answers import Answers, Question
from penstock.evaluate.needle_cells import NeedleCell, needle_tables, summarise_needles

Asked = list[tuple[str, list[tuple[int, float, str]]]]
"""Setting, and for each prompt its tokens, where its needle is and what it is about."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A model that finds needles in the first half of short documents, and says what it saw."""
    seen: Asked = []

    def fake(
        loaded: Any, question: Question, setting: Setting, *, chunk: int, shared: Any, store: str
    ) -> Answers:
        if setting.text == "kvswap@1/999":
            raise BudgetError("too little memory")
        texts, places = [], []
        for sample in question.samples:
            body, _, asks = sample.prompt.rpartition(" Question : ")
            key = asks.partition(" for ")[2].partition(" ?")[0]
            where = body.split(" . ")
            needle = next(n for n, part in enumerate(where) if f" for {key} is " in part)
            tokens = len(sample.prompt.split()) + 1
            places.append((tokens, needle / (len(where) - 1), key))
            found = tokens <= 300 and places[-1][1] < 0.6
            texts.append(sample.answer if found else "nothing .")
        seen.append((setting.text, places))
        return Answers(
            texts=texts, seconds=0.1, tokens=9, read_bytes=0, units_wanted=0, units_hit=0,
            ledger_bytes=100 * len(texts), full_cache_bytes=1300 * len(texts),
        )  # fmt: skip

    monkeypatch.setattr(needles, "answer", fake)
    monkeypatch.setattr(needles, "SharedPrefill", lambda *_: None)
    return seen


def scores(result: Any) -> dict[tuple[str, int, float], list[float]]:
    cells = result["figures"]["cells"] if isinstance(result, dict) else result.figures["cells"]
    return {(c["setting"], c["tokens"], c["depth"]): c["scores"] for c in cells}


def test_scores_go_to_the_length_and_depth_they_were_asked_at(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grid.json"
    result = needles.run([
        "--lengths=600,300", "--depths=3", "--samples=3", "--batch=5", f"--out={out}", "--json",
        "--settings=full,kvswap@1/2,kvswap@1/999",
    ])  # fmt: skip
    found = scores(result)
    for setting in ("full", "kvswap@1/2"):
        for depth in (0.0, 0.5, 1.0):
            assert found[setting, 600, depth] == [0.0] * 3
            assert found[setting, 300, depth] == [1.0 if depth < 1 else 0.0] * 3
    assert all(not found["kvswap@1/999", tokens, 0.5] for tokens in (300, 600))
    prompts = [place for setting, places in asked if setting == "full" for place in places]
    assert sorted({tokens for tokens, _, _ in prompts}) == [300, 600]
    for depth in (0.0, 0.5, 1.0):
        near = [place for place in prompts if abs(place[1] - depth) < 0.2]
        assert len(near) == 2 * 3
        assert len({key for _, _, key in near}) == 2 * 3, "samples differ"
    assert max(len(places) for _, places in asked) == 3, "depths of one sample go together"
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == json.loads(out.read_text())
    assert "not run: kvswap@1/999, 300 tokens: 0 of 9 samples (too little memory)" in printed
    summary = {(s["setting"], s["tokens"]): s for s in result.figures["summary"]}
    assert summary["full", 300]["mean"] == pytest.approx(2 / 3)
    assert summary["full", 300]["samples"] == 9
    assert summary["full", 300]["full_cache_bytes"] == 13 * summary["full", 300]["ledger_bytes"]
    assert summary["kvswap@1/999", 300]["mean"] is None


def test_a_small_batch_divides_the_depths(asked: Asked) -> None:
    result = needles.run(["--lengths=300", "--depths=3", "--samples=2", "--batch=2"])
    assert [len(places) for _, places in asked[:2]] == [2, 2]
    assert {len(found) for found in scores(result).values()} == {2}
    with pytest.raises(ConfigError, match="at least 1"):
        needles.run(["--lengths=300", "--batch=0"])


def test_the_bundled_model_finds_needles(tmp_path: Path) -> None:
    out = tmp_path / "real.json"
    needles.run([
        "--lengths=400,600", "--depths=2", "--samples=1", "--batch=2", "--disk=memory",
        "--settings=full,streaming_llm@1/4", "--chunk=512", f"--out={out}",
    ])  # fmt: skip
    saved = json.loads(out.read_text())
    assert saved["kind"] == "needles"
    assert saved["settings"]["task"] == "single_essay"
    assert sum(found[0] for key, found in scores(saved).items() if key[0] == "full") >= 3
    assert saved["figures"]["summary"][0]["ledger_bytes"] > 0


def test_an_interrupted_grid_goes_on(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "half.json"
    arguments = [
        "--lengths=300,400", "--depths=2", "--batch=2", "--settings=full,kvswap@1/2",
        f"--out={out}",
    ]  # fmt: skip
    whole: Any = vars(needles)["answer"]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(needles, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        needles.run([*arguments, "--samples=2"])
    assert "not run: kvswap@1/2, 400 tokens: 0 of 4 samples (stopped before)" in (
        capsys.readouterr().out
    )
    half = scores(json.loads(out.read_text()))
    assert [len(found) for found in half.values()] == [1, 1, 1, 1, 1, 1, 0, 0]
    monkeypatch.setattr(needles, "answer", whole)
    asked.clear()
    result = needles.run([*arguments, "--samples=3", "--resume"])
    assert [setting for setting, _ in asked] == ["kvswap@1/2", *["full", "kvswap@1/2"] * 4]
    assert {len(found) for found in scores(result).values()} == {3}
    assert "100%" not in capsys.readouterr().err
    asked.clear()
    needles.run([*arguments, "--samples=3", "--resume", "--depths=3"])
    assert all(0.3 < depth < 0.7 for _, places in asked for _, depth, _ in places)
    for wrong, reason in [
        ("--seed=1", "seed=0"), ("--lengths=300", "at 400 tokens"),
        ("--task=single_noise", "task=single_essay"), ("--batch=1", "batch=2"),
        ("--depths=4", "depth 0.5"), ("--dtype=bfloat16", "dtype=None"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"cannot resume.*{reason}"):
            needles.run([*arguments, "--samples=3", "--depths=3", "--resume", wrong])
    assert {len(found) for found in scores(json.loads(out.read_text())).values()} == {3}


def test_a_setting_that_joins_later_changes_nothing_for_the_others(
    asked: Asked, tmp_path: Path
) -> None:
    arguments = ["--lengths=300", "--depths=2", "--batch=4", f"--out={tmp_path / 'a.json'}"]
    needles.run([*arguments, "--settings=full", "--samples=1"])
    result = needles.run([*arguments, "--settings=full,quest@1/2", "--samples=2", "--resume"])
    assert {len(found) for found in scores(result).values()} == {2}
    assert scores(result)["full", 300, 0.0] == [1.0, 1.0]


def test_what_was_refused_is_not_asked_again(asked: Asked, tmp_path: Path) -> None:
    arguments = ["--lengths=300", "--depths=2", "--settings=kvswap@1/999,full", "--samples=1"]
    needles.run([*arguments, f"--out={tmp_path / 'a.json'}"])
    result = needles.run([*arguments, f"--out={tmp_path / 'a.json'}", "--resume"])
    assert len(asked) == 1
    assert result.figures["cells"][0]["refused"] == "too little memory"


def test_the_time_limit(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    result = needles.run(["--lengths=300", "--depths=2", "--minutes=-1"])
    assert asked == []
    assert {len(found) for found in scores(result).values()} == {0}
    assert "time is up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--lengths=many", "--lengths takes numbers"),
        ("--lengths=0", "--lengths takes numbers from 1"),
        ("--depths=0", "at least one depth"),
        ("--task=copy", "no task with one needle"),
        ("--settings=magic", "no policy"),
        ("--resume", "--output"),
    ],
)
def test_what_cannot_be_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        needles.run([argument])


def test_tables_have_depths_down_and_lengths_across() -> None:
    cells = [
        NeedleCell(tokens=2048, depth=0.0, setting="full", scores=[1.0, 0.5]),
        NeedleCell(tokens=2048, depth=1.0, setting="full", scores=[0.0]),
        NeedleCell(tokens=1024, depth=0.0, setting="full", refused="no"),
        NeedleCell(tokens=1024, depth=1.0, setting="full"),
    ]
    lines = [line.split() for line in needle_tables(cells).splitlines()]
    assert lines[0] == ["full", "1,024", "2,048"]
    assert lines[2] == ["0", "%", "deep", "no", "room", "75"]
    assert lines[3] == ["100", "%", "deep", "0"]
    means = {row["tokens"]: row["mean"] for row in summarise_needles(cells)}
    assert means == {2048: pytest.approx(0.375), 1024: None}


def test_the_command_is_there() -> None:
    assert "needles" in {command.name for command in bench_app.registered_commands}
