"""Real text as a haystack: sentences, sources of tasks, refusals."""

import random

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import GeneratedTasks
from penstock.evaluate.tasks.english.filler import joined
from penstock.evaluate.tasks.english.haystack import TextHaystack, split_sentences
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.english.registry import make_english_sample

REAL = (
    'A title\n\nMr. A. B. Smith came in. He said "No!" Then he left.\n\n'
    "It was late.\nA verse,\n\n3. The last one."
)


def test_sentences_of_a_text_join_to_it_again() -> None:
    pieces = split_sentences(f"\n{REAL} ")
    assert joined(pieces, " ") == REAL
    assert pieces == [
        "A title", "\n\nMr. A. B. Smith came in.", 'He said "No!"', "Then he left.",
        "\n\nIt was late.", "\nA verse,", "\n\n3. The last one.",
    ]  # fmt: skip


def test_an_empty_haystack_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        TextHaystack([" \n"])


def test_generated_tasks_take_texts(bpe: TextTokenizer) -> None:
    [sample] = GeneratedTasks(bpe, texts=[REAL]).draw("single_2", 3, 1, tokens=2000, seed=5)
    rng = random.Random("5/single_2/2000/3")
    expected = make_english_sample("single_2", 2000, rng, bpe, haystack=TextHaystack([REAL]))
    assert sample == expected
    assert "Mr. A. B. Smith" in sample.prompt
    [made_up] = GeneratedTasks(bpe).draw("single_2", 3, 1, tokens=2000, seed=5)
    assert made_up.values == sample.values
    assert "Mr. A. B. Smith" not in made_up.prompt


def test_the_bundled_model_reads_no_english_haystack(bundled: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="--haystack"):
        GeneratedTasks(bundled, texts=[REAL])
