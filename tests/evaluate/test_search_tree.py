"""The picture of a search: every candidate is in it, and where it belongs."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError, StorageError
from penstock.engine.beams.decoding import StepTraffic
from penstock.evaluate.search_tree import draw_search_tree, write_search_tree
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import (
    Fate,
    SearchBeam,
    SearchNode,
    SearchOutput,
    SearchTree,
    StepRecord,
)


def made_up(beams: int, steps: int, text: str = "and so on", **settings: Any) -> SearchOutput:
    """A search of width 2 with random scores, whose last step finishes."""
    chance = random.Random(beams * steps)
    tree, records = SearchTree(), []
    parents: list[int | None] = [None] * (beams // 2)
    for step in range(steps):
        found = [(chance.gauss(0, 1), parent) for parent in parents for _ in range(2)]
        kept = sorted(found, key=lambda pair: -pair[0])[: beams // 2]
        fate: Fate = "finished" if step == steps - 1 else "kept"
        nodes = [
            SearchNode(
                id=len(tree) + at, parent=parent, step=step, token_ids=[1], text="a ",
                text_start=2 * step, score=score, num_tokens=step + 1, log_probability=score,
                fate=fate if (score, parent) in kept else "pruned",
            )
            for at, (score, parent) in enumerate(found)
        ]  # fmt: skip
        tree.nodes.extend(nodes)
        parents = [node.id for node in nodes if node.fate != "pruned"]
        records.append(
            StepRecord(
                step=step, num_candidates=beams, num_kept=0, num_finished=0, new_tokens=beams,
                group_sizes=[beams], traffic=StepTraffic(), decode_s=1, score_s=0,
            )
        )  # fmt: skip
    done = sorted((node for node in tree if node.fate == "finished"), key=lambda n: -n.score)
    answers = [
        SearchBeam(
            text=text, token_ids=[1] * steps, score=node.score, log_probability=node.score,
            finish_reason="length", node=node.id,
        )
        for node in done
    ]  # fmt: skip
    return SearchOutput(
        prompt="", prompt_token_ids=[1], beams=answers, tree=tree, steps=records,
        settings=vars_of(SearchParams(beams=beams, step_tokens=8, **settings)), scorer="logprob",
        prefill_s=0, wall_s=1, interrupted=False,
    )  # fmt: skip


def vars_of(params: SearchParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in ("beams", "width", "step_tokens", "delimiter")}


def drawn(figure: Figure) -> list[tuple[tuple[float, float], float | None]]:
    """Places and scores of all dots, the winning path's second ones left out."""
    dots = []
    for collection in figure.axes[0].collections:
        if not isinstance(collection, PathCollection) or collection.get_zorder() != 3:
            continue
        places: Any = np.asarray(collection.get_offsets())
        scores: Any = collection.get_array() if len(places) else []
        scores = [None] * len(places) if scores is None else scores
        dots += [(tuple(place), score) for place, score in zip(places, scores, strict=True)]
    return dots


@pytest.mark.parametrize(("beams", "steps"), [(4, 4), (16, 10), (64, 6)])
def test_every_candidate_stands_in_its_steps_column(beams: int, steps: int) -> None:
    output = made_up(beams, steps)
    dots = drawn(draw_search_tree(output, model="recall"))
    assert len(dots) == len({place for place, _ in dots}) == beams * steps
    for step in range(steps):
        scores = sorted(float(score or 0) for (x, _), score in dots if x == step + 1)
        assert scores == pytest.approx(sorted(node.score for node in output.tree.of_step(step)))
    assert all(0 < y < 1 for (_, y), _ in dots)


def test_lines_do_not_cross_and_the_best_path_is_bold() -> None:
    output = made_up(16, 8)
    figure = draw_search_tree(output, model="recall")
    place_of = {round(score, 12): place for place, score in drawn(figure) if score is not None}
    lines = [
        (place_of[round(output.tree.nodes[node.parent].score, 12)], place_of[round(node.score, 12)])
        for node in output.tree
        if node.parent is not None
    ]
    for (x, y), (_, end) in lines:
        for (other_x, other_y), (_, other_end) in lines:
            assert x != other_x or y <= other_y or end > other_end
    [bold] = [c for c in figure.axes[0].collections if c.get_zorder() == 4]
    assert bold.get_linewidth() == 3
    ends = [tuple(np.asarray(path.vertices)[-1]) for path in bold.get_paths()]
    assert output.best is not None
    path = output.tree.path(output.best.node)
    assert ends == [place_of[round(node.score, 12)] for node in path]


def test_the_title_says_what_it_is_and_fits() -> None:
    answer = "costs $5 and\nthen $6 " * 20
    figure = draw_search_tree(made_up(4, 1, answer, delimiter="\n\n"), model="x" * 200)
    figure.canvas.draw()
    title = figure._suptitle  # type: ignore[attr-defined]
    assert "4 beams, width 2, scored by logprob" in " ".join(title.get_text().split())
    assert title.get_text().endswith(r"then \$6")
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert r"up to '\n\n'" in figure.axes[0].get_xlabel()


def test_scores_that_are_no_numbers_or_all_equal() -> None:
    output = made_up(4, 2)
    for index in (1, 5):
        output.tree.nodes[index] = replace(output.tree.nodes[index], score=-math.inf, fate="pruned")
    dots = drawn(draw_search_tree(output, model="recall"))
    assert sum(score is None for _, score in dots) == 2
    output.tree.nodes[:] = [replace(node, score=0.5) for node in output.tree]
    draw_search_tree(output, model="recall").canvas.draw()


def test_an_interrupted_search_has_a_picture_too(tmp_path: Path) -> None:
    output = replace(made_up(4, 3), interrupted=True)
    figure = draw_search_tree(output, model="recall")
    assert "best answer so far" in figure._suptitle.get_text()  # type: ignore[attr-defined]
    without = replace(output, beams=[])
    write_search_tree(without, tmp_path / "tree.png", model="recall")
    nothing = replace(without, tree=SearchTree(), steps=[])
    with pytest.raises(ConfigError, match="no candidates to draw"):
        write_search_tree(nothing, tmp_path / "none.png", model="recall")


@pytest.mark.parametrize(
    ("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")]
)
def test_files(tmp_path: Path, kind: str, begins: bytes) -> None:
    path = tmp_path / f"tree.{kind}"
    write_search_tree(made_up(4, 2), path, model="recall")
    assert path.read_bytes().startswith(begins)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has to end in \.png, \.svg, \.pdf"):
        write_search_tree(made_up(4, 2), tmp_path / "tree.txt", model="recall")
    with pytest.raises(StorageError, match="cannot write the tree"):
        write_search_tree(made_up(4, 2), tmp_path / "no" / "tree.png", model="recall")
