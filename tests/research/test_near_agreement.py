"""Cheap scores against exact column sums: the figures by brute force, and as a program."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.clusters.recording import KeyStream
from research.figures import near_storage
from research.figures.chart import draw
from research.near_storage import program
from research.near_storage.agreement import measure_agreement
from research.near_storage.program import SCORE_NAMES
from tests.research.drawn_figures import figures_drawn

NORMALISERS = [name for name in SCORE_NAMES if name not in ("engine", "products")]
PROMPT, OUTPUT, TOP = 80, 20, 0.2
SCALING = 0.4


@pytest.fixture(scope="module")
def stream() -> KeyStream:
    """Heads whose logits differ in size from step to step, so that normalisers matter."""
    draw = torch.Generator().manual_seed(2)
    total = PROMPT + OUTPUT
    queries = torch.randn(6, total, 16, generator=draw)
    queries *= 0.3 + 2.5 * torch.rand(6, total, 1, generator=draw)
    return KeyStream(
        prompt_tokens=PROMPT, scaling=[SCALING, SCALING], layers=(0, 1), expected=1.0,
        keys=[torch.randn(2, total, 16, generator=draw) for _ in range(2)],
        queries=[queries, queries.flip(0)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows(stream: KeyStream) -> dict[tuple[str, int], dict[str, Any]]:
    done: list[int] = []
    found = measure_agreement(
        stream, [TOP], hot_share=0.4, dtype="float32", on_layer=done.append
    )  # fmt: skip
    assert done == [1, 2]
    return {(row["rule"], row["bits"]): row for row in found["rows"]}


def all_logits(stream: KeyStream, layer: int, length: int) -> torch.Tensor:
    keys = stream.keys[layer].repeat_interleave(3, dim=0)[:, : length + 1]
    return (stream.queries[layer][:, length, None] @ keys.transpose(1, 2))[:, 0] * SCALING


def chosen(scores: torch.Tensor, length: int) -> set[int]:
    return set(scores[:length].topk(int(np.ceil(TOP * length - 1e-9))).indices.tolist())


def test_overlaps_by_brute_force(
    stream: KeyStream, rows: dict[tuple[str, int], dict[str, Any]]
) -> None:
    """Steps from half of the output on; products and both normalisers over everything."""
    for layer in range(2):
        overlaps: dict[str, list[float]] = {"products": [], "last": []}
        masses: list[float] = []
        for length in range(PROMPT + OUTPUT // 2, PROMPT + OUTPUT):
            logits = all_logits(stream, layer, length)
            last = all_logits(stream, layer, length - 1).logsumexp(dim=1, keepdim=True)
            importance = logits.softmax(dim=1).sum(dim=0)
            right = chosen(importance, length)
            for name, scores in (
                ("products", logits.sum(dim=0)), ("last", (logits - last).exp().sum(dim=0)),
            ):  # fmt: skip
                mine = chosen(scores, length)
                overlaps[name].append(len(mine & right) / len(right))
                if name == "last":
                    mass = importance[list(mine)].sum() / importance[:length].sum()
                    masses.append(float(mass))
        for name, values in overlaps.items():
            assert rows[name, 16]["overlap_of_layer"][layer] == pytest.approx(
                np.mean(values), abs=1e-4
            )
        assert rows["last", 16]["mass_of_layer"][layer] == pytest.approx(np.mean(masses), abs=1e-4)


def test_normalisers_are_better_the_more_they_know(
    rows: dict[tuple[str, int], dict[str, Any]],
) -> None:
    assert rows["now", 16]["overlap"] == 1.0
    last, hot, sampled = (rows[name, 16]["overlap"] for name in ("last", "hot", "hot_sample"))
    assert last < 0.8 < hot < 1.0
    assert last < 0.8 < sampled < 1.0
    for bits, least in ((8, 0.95), (4, 0.8)):
        assert least < rows["now", bits]["overlap"] < 1.0
        assert rows["now", bits]["overlap"] <= rows["engine", bits]["overlap"] <= 1.0
    for name in (*NORMALISERS, "products"):
        assert rows[name, 16]["same"] == 1.0
        assert 1.0 >= rows[name, 8]["same"] > rows[name, 4]["same"] > 0.8


def test_rows_and_best_mass(stream: KeyStream) -> None:
    found = measure_agreement(
        stream.only([1]), [0.1, 0.3], hot_share=0.2, dtype="float32", on_layer=lambda _: None
    )
    rules = {(row["rule"], row["bits"]) for row in found["rows"]}
    assert rules == {("engine", bits) for bits in (8, 4)} | {
        (name, bits) for name in ("products", *NORMALISERS) for bits in (16, 8, 4)
    }
    assert [row["top"] for row in found["best_mass"]] == [0.1, 0.3]
    assert found["best_mass"][0]["mass"] < found["best_mass"][1]["mass"] < 1.0
    for row in found["rows"]:
        [most] = [one["mass"] for one in found["best_mass"] if one["top"] == row["top"]]
        assert row["mass"] <= most + 1e-6


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "near-agreement-small.json"
    result = program.run(
        ["agreement", "--prompt=200", "--max-new-tokens=12", f"--out={out}", "--json"]
    )
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads(out.read_text()) == result.as_dict()
    assert result.kind == "near_storage.agreement"
    assert result.command.startswith("python -m research.near_storage agreement --prompt")
    text = "\n".join(lines)
    for row in result.figures["rows"]:
        assert f"{row['overlap']:.1%}" in text
    by_name = {(row["rule"], row["bits"], row["top"]): row for row in result.figures["rows"]}
    assert by_name["engine", 8, 0.2]["overlap"] > 0.97
    assert by_name["products", 16, 0.2]["overlap"] < 0.8
    assert figures_drawn(out) == ["near-agreement-small"]
    assert len(draw(near_storage.agreement(result)).axes) == 2
    with pytest.raises(ConfigError, match="no rows"):
        draw(near_storage.agreement(Result.begin("near_storage", [], {}, seed=0)))
