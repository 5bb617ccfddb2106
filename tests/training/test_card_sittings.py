"""Cards of models trained in several sittings: the chain is found, counted on and told."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from training import model_card
from training.card_recipe import recipes
from training.card_sittings import (
    asked,
    cannot,
    joined,
    other_seeds,
    read_chain,
    read_log,
    sittings,
)
from training.curves import sitting_starts

PLAN = {
    "matrix_rate": 0.02, "matrix_momentum": 0.95, "matrix_decay": 0.05, "other_rate": 0.004,
    "warmup_steps": 1, "decay_steps": 3,
}  # fmt: skip
ROWS = {
    "answer_floor": 40, "answer_cap": 128, "other_weight": 0.03, "other_share": 0.03,
    "jump_share": 0.5, "jump_below": 16384, "jumps": 6,
}  # fmt: skip
SHAPE = {
    "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "feed_forward": 8,
    "rope_theta": 1e4, "positions": 512,
}  # fmt: skip


def settings(name: str, seed: int) -> dict[str, Any]:
    stages = [{"lengths": [256], "steps": 3, "mix": {"copy": 1.0}}, {"lengths": [512], "steps": 9}]
    return {
        "name": name, "seed": seed, "micro_batch_tokens": 512, "micro_batches": 1, "model": SHAPE,
        "stages": stages, "mix": {"multi_value": 1.0}, "rows": ROWS, "optimizer": PLAN,
    }  # fmt: skip


def train_step(step: int) -> dict[str, Any]:
    return {
        "kind": "train", "step": step, "tokens": 1000 * step, "loss": 0.5, "trained_s": 60.0 * step,
        "by_task": {"copy": 0.5}, "tokens_per_s": 1e6, "longest": 512, "rate_factor": 0.5,
    }  # fmt: skip


def digest(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def make_run(folder: Path, name: str, *, seed: int, steps: int, begun: str = "") -> Path:
    """A finished run of two records, whose weights are just its folder's name."""
    run = folder / f"{name}-{seed}"
    (run / "model").mkdir(parents=True)
    (run / "model" / "model.safetensors").write_text(run.name)
    begin: dict[str, Any] = {
        "kind": "begin", "step": 0, "settings": settings(name, seed), "device": "a GPU",
        "commit": f"c{seed}", "date": "2026-11-22T00:00:00", "fit_minutes": 1.5 * steps,
    }  # fmt: skip
    if begun:
        begin["begun_with"] = {"model": "somewhere/model", "sha256": begun}
    glance = {"kind": "glance", "step": steps, "exact": [{"task": "copy", "exact": 0.25}]}
    records = [begin, train_step(1), train_step(steps), glance]
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    first = make_run(tmp_path, "toy", seed=1, steps=5)
    second = make_run(tmp_path, "toy-second", seed=2, steps=4, begun=digest(first))
    make_run(tmp_path, "toy", seed=9, steps=5)  # of another chain
    third = make_run(tmp_path, "toy-third", seed=3, steps=2, begun=digest(second))
    return [first, second, third]


def cell(task: str, tokens: int, exact: int, asked: int = 100) -> dict[str, Any]:
    return {
        "task": task, "tokens": tokens, "asked": asked, "exact": exact, "answer_tokens": 9 * asked,
        "right_tokens": 0, "leading_tokens": 0, "generated": 0, "refused": "",
    }  # fmt: skip


def evaluation(*cells: dict[str, Any]) -> Result:
    return Result(
        kind="training-evaluation", command="python -m training.evaluate PATH",
        settings={"device": "cpu"}, seed=0, machine={}, libraries={}, commit="c", date="",
        figures={"cells": list(cells)},
    )  # fmt: skip


def test_a_chain_is_found_by_the_sums_of_its_weights(chain: list[Path]) -> None:
    assert read_chain(chain[2])[0] == chain
    assert read_chain(chain[0])[0] == chain[:1]
    (chain[1] / "model" / "model.safetensors").write_text("other weights")
    assert read_chain(chain[2])[0] == chain[2:]


def test_a_log_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_log(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").write_text('{"kind": "begin"}\n')
    with pytest.raises(ConfigError, match="train first"):
        read_log(tmp_path / "log.jsonl")


def test_steps_tokens_and_time_count_on(chain: list[Path]) -> None:
    records = joined(read_chain(chain[2])[1])
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 5, 6, 9, 10, 11]
    assert [record["tokens"] for record in train] == [1000 * record["step"] for record in train]
    assert train[-1]["trained_s"] == 660.0
    glances = [record["step"] for record in records if record["kind"] == "glance"]
    assert glances == [5, 9, 11]
    assert sitting_starts(records) == [0.005, 0.009]


def test_sittings_tell_the_commands_and_the_weights(chain: list[Path]) -> None:
    lines = sittings(*read_chain(chain[2])).splitlines()[2:]
    start = "python -m training.train training/configs/toy"
    for number, (line, command) in enumerate(
        zip(
            lines,
            [
                f"{start}.toml --fit 7.5 --seed 1",
                f"{start}-second.toml --from the model of 1 --fit 6 --seed 2",
                f"{start}-third.toml --from the model of 2 --fit 3 --seed 3",
            ],
            strict=True,
        )
    ):
        assert line.startswith(f"{number + 1}. `{command}`: ")
        assert digest(chain[number]) in line
        assert f"commit c{number + 1};" in line


def test_what_a_model_does_not_do_follows_from_its_cells() -> None:
    result = evaluation(
        cell("copy", 1024, 97), cell("copy", 8192, 90), cell("sums", 1024, 1),
        cell("sums", 8192, 0), cell("walk", 1024, 95), cell("walk", 8192, 55),
        cell("walk", 9000, 0, asked=0),
    )  # fmt: skip
    assert cannot(result).splitlines() == [
        "* Not learnt: sums.",
        "* walk is right in less than 90% of answers: 0.55 at 8,192.",
    ]
    assert cannot(evaluation(cell("copy", 1024, 99))) == ""
    assert cannot(None) == ""
    assert asked([cell("a", 1, 1), cell("b", 1, 1, asked=80)]) == "80 to 100"
    assert asked([cell("a", 1, 1), cell("b", 1, 1)]) == "100"
    assert asked([cell("a", 1, 0, asked=0)]) == "0"


def test_the_card_of_several_sittings(
    chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, other = chain[2], tmp_path / "toy-9"
    (last / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(model_card, "_parameters", lambda model: 2_000_000)
    evaluation(cell("walk", 1024, 55)).save(last / "evaluation.json")
    (tmp_path / "notes.md").write_text("## Mine\n\nSaid by hand.\n")
    given = [str(last), "--notes", str(tmp_path / "notes.md"), "--other", str(other)]
    assert model_card.main(given) == 2, "the other run has no evaluation"
    evaluation(cell("walk", 1024, 33, asked=80)).save(other / "evaluation.json")
    assert model_card.main(given) == 0
    card = (last / "model" / "README.md").read_text()
    assert card.startswith("# toy\n\nTrained from random weights on a GPU")
    for said in ("11 steps, fitted into 16.5 minutes", "11.0 minutes of training in 3 sitting(s)",
                 "## Mine\n\nSaid by hand.", "### Sitting 2: toy-second", "Seed 3, commit c3",
                 "Mix (not of stage 1: see the settings): multi_value 1.00.",
                 "0.55 at 1,024", "## The same with other seeds", "80 samples a cell",
                 "--seed 9`"):  # fmt: skip
        assert said in card, said
    with pytest.raises(ConfigError, match="cannot read"):
        model_card.write_card(last, tmp_path / "none", notes=tmp_path / "none.md")
    assert "walk   0.41" in other_seeds([other])


def test_a_run_whose_beginning_is_elsewhere_says_so(
    chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (chain[1] / "model" / "model.safetensors").unlink()
    (chain[2] / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(model_card, "_parameters", lambda model: 2_000_000)
    monkeypatch.setattr(model_card, "_draw", lambda records, folder: False)
    model_card.write_card(chain[2], chain[2] / "none.json")
    card = (chain[2] / "model" / "README.md").read_text()
    assert card.startswith("# toy-third\n\nBegun with the weights of somewhere/model")
    assert "### Sitting" not in card
    assert model_card.main([str(chain[2]), "--name", "toy-2"]) == 0
    assert (chain[2] / "model" / "README.md").read_text().startswith("# toy-2\n\nBegun with")


def test_a_recipe_tells_its_decay_and_what_weighs_more(chain: list[Path]) -> None:
    log = read_log(chain[0] / "log.jsonl")
    plain = recipes([log])[0]
    assert "linear decay by the clock" in plain
    assert "behind a =" not in plain
    log[0]["settings"]["optimizer"] = {**PLAN, "decay_power": 2}
    log[0]["settings"]["rows"] = {**ROWS, "state_weight": 4}
    told = recipes([log])[0]
    assert "(time left)^2 decay by the clock" in told
    assert "weighed as 40 to 128 tokens each; 4 times as much behind a =; 0.03 on" in told
