"""Depths of the bundled model's needles, the grid, and sources that choose the language."""

import random

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import GeneratedTasks, GridPoint, Words, even_depths, grid, make_sample
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.english.registry import ENGLISH_TASKS
from penstock.evaluate.tasks.grid import places_at
from penstock.evaluate.tasks.recall import DEFAULT_TASKS, DEPTH_TASKS, TASKS
from penstock.evaluate.tasks.sample import Sample


def recall_sample(task: str, bundled: TextTokenizer, depth: float | None, seed: int = 0) -> Sample:
    vocabulary = bundled.get_vocab()  # type: ignore[attr-defined]
    return make_sample(task, 2048, random.Random(seed), Words.of(vocabulary), depth=depth)


def needle_depth(sample: Sample) -> float:
    """Share of the document's tokens in front of the needle."""
    document, question = sample.prompt.rsplit(" Question : ", 1)
    body = document.partition("later . ")[2]
    key = question.partition(" for ")[2].partition(" ?")[0]
    needle = body.index(f" for {key} is ")
    previous = body.rfind(". The ", 0, needle)
    start = previous + 2 if previous >= 0 else 0
    end = body.index(" .", needle) + 2
    ahead, behind = body[:start].split(), body[end:].split()
    return len(ahead) / (len(ahead) + len(behind))


@pytest.mark.parametrize("task", sorted(DEPTH_TASKS))
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_the_asked_needle_lies_at_its_depth(
    task: str, depth: float, bundled: TextTokenizer
) -> None:
    sample = recall_sample(task, bundled, depth)
    assert needle_depth(sample) == pytest.approx(depth, abs=0.0 if depth in (0.0, 1.0) else 0.01)
    assert sample.depth == depth
    anywhere = recall_sample(task, bundled, None)
    assert anywhere.depth is None
    assert sorted(anywhere.prompt.split()) == sorted(sample.prompt.split())
    assert anywhere.answer == sample.answer


def test_recall_depths_that_cannot_be(bundled: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="outside 0"):
        recall_sample("single_essay", bundled, -0.1)
    with pytest.raises(ConfigError, match="copy has no depth"):
        recall_sample("copy", bundled, 0.5)


def test_no_room_for_a_fact(bundled: TextTokenizer) -> None:
    vocabulary = bundled.get_vocab()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="too short"):
        make_sample("multi_key_full", 50, random.Random(0), vocabulary)


def test_grid() -> None:
    points = grid([1024, 4096], even_depths(3))
    assert points == [GridPoint(n, d) for n in (1024, 4096) for d in (0.0, 0.5, 1.0)]
    assert even_depths(1) == (0.5,)
    assert even_depths(5) == (0.0, 0.25, 0.5, 0.75, 1.0)
    for lengths, depths in [([], [0.5]), ([1024], []), ([0], [0.5]), ([1024], [1.01])]:
        with pytest.raises(ConfigError):
            grid(lengths, depths)
    with pytest.raises(ConfigError, match="at least one depth"):
        even_depths(0)


def test_places_are_the_nearest() -> None:
    assert places_at([0.0, 0.24, 0.26, 0.5, 1.0], [10, 10]) == [0, 0, 1, 1, 2]
    assert places_at([0.5], [1, 1, 98]) == [2]
    assert places_at([0.0, 1.0], []) == [0, 0]


def test_a_source_speaks_the_models_language(bpe: TextTokenizer, bundled: TextTokenizer) -> None:
    recall, english = GeneratedTasks(bundled), GeneratedTasks(bpe)
    assert (recall.language, tuple(recall.names)) == ("recall", tuple(TASKS))
    assert (english.language, tuple(english.names)) == ("english", tuple(ENGLISH_TASKS))
    assert (tuple(recall.default_names), english.default_names) == (DEFAULT_TASKS, english.names)
    assert recall.depth_names <= set(recall.names)
    assert english.depth_names <= set(english.names)
    for source, task in [(recall, "single_essay"), (english, "single_2")]:
        first, second = source.draw(task, 0, 2, tokens=1000, seed=5)
        assert source.draw(task, 1, 1, tokens=1000, seed=5) == [second] != [first]
        assert source.draw(task, 0, 1, tokens=1000, seed=6) != [first]
        [deep] = source.draw(task, 0, 1, tokens=1000, seed=5, depth=1.0)
        assert deep.answer == first.answer
        with pytest.raises(ConfigError, match="no task is called"):
            source.draw("riddle", 0, 1, tokens=1000, seed=5)


def test_a_source_with_chat(bpe: TextTokenizer, bundled: TextTokenizer) -> None:
    [sample] = GeneratedTasks(bpe, chat=True).draw("single_1", 0, 1, tokens=1000, seed=0)
    assert sample.token_ids is not None
    with pytest.raises(ConfigError, match="no chat template"):
        GeneratedTasks(bundled, chat=True)
