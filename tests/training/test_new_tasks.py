"""Aggregation and long output: every answer again, from the document alone, in another way."""

import random
import re
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import Sample, Words, judge
from penstock.evaluate.tasks.aggregation import (
    count_words,
    flagged_sum,
    frequent_words,
    longest_list,
    most_frequent,
)
from penstock.evaluate.tasks.long_output import long_walk, output_tokens
from training.checkpoint import read_vocabulary

VOCABULARY = read_vocabulary()
WORDS = Words.of(VOCABULARY)
TASKS = [most_frequent, frequent_words, count_words, flagged_sum, longest_list, long_walk]
LENGTHS = [256, 700, 1024, 5000]
SLACK = 8  # tokens of the longest sentence of a task that fills up with sentences of one length

each_task = pytest.mark.parametrize("task", TASKS)


def samples_of(task: Callable[..., Sample], count: int = 6) -> list[Sample]:
    seeds = [(tokens, seed) for tokens in LENGTHS for seed in range(count)]
    return [task(tokens, random.Random(f"{tokens}/{seed}"), WORDS) for tokens, seed in seeds]


def parts(sample: Sample) -> tuple[str, str]:
    """The document without its preface, and the question."""
    document, question = sample.prompt.rsplit(" Question : ", 1)
    return re.split(r" (?:later|!) \. ", document, maxsplit=1)[1], question


@each_task
@pytest.mark.parametrize("tokens", LENGTHS)
def test_length_words_and_reproducibility(task: Callable[..., Sample], tokens: int) -> None:
    for seed in range(8):
        sample = task(tokens, random.Random(seed), WORDS)
        assert tokens - SLACK < 1 + len(sample.prompt.split()) <= tokens
        assert set(f"{sample.prompt} {sample.answer}".split()) <= set(VOCABULARY)
        assert sample.max_new_tokens == len(sample.answer.split()) + 1
        assert sample.task == task.__name__
        assert sample == task(tokens, random.Random(seed), WORDS)
        assert judge(sample, sample.answer) == 1.0
        assert judge(sample, sample.answer.replace(" ", " the ", 1)) < 1.0


@pytest.mark.parametrize(
    ("task", "tokens"),
    [
        *((task, 20) for task in TASKS),
        (frequent_words, 60),
        (most_frequent, 60),
        (longest_list, 60),
        (long_walk, 100),
        (flagged_sum, 33),
    ],
)
def test_too_few_tokens_are_refused(task: Callable[..., Sample], tokens: int) -> None:
    with pytest.raises(ConfigError, match="too short"):
        task(tokens, random.Random(0), WORDS)


def test_the_most_frequent_word_comes_three_times_as_often_as_any_other() -> None:
    seen = set()
    for sample in samples_of(most_frequent, 12):
        body, _ = parts(sample)
        (word, most), (_, second), *others = Counter(body.replace(" .", "").split()).most_common()
        assert sample.answer == f"{word} ."
        assert most >= 3 * second
        assert 6 <= len(others) + 1 <= 16
        assert most >= 0.15 * (most + second + sum(count for _, count in others))
        seen.add(word)
    assert len(seen) > 20


def test_frequent_words_stand_out_in_their_order() -> None:
    for sample in samples_of(frequent_words):
        body, _ = parts(sample)
        counts = Counter(word for word in body.split() if word != ".").most_common()
        assert sample.answer == " ".join(word for word, _ in counts[:3]) + " ."
        first, second, third, *others = (count for _, count in counts)
        assert first > second > third
        assert first >= 1.2 * second
        assert second >= 1.2 * third
        assert max(others) <= 0.5 * third


def test_frequent_words_lie_all_over_the_document() -> None:
    sample = frequent_words(5000, random.Random(1), WORDS)
    words = parts(sample)[0].split()
    top = sample.answer.split()[2]
    halves = [words[: len(words) // 2].count(top), words[len(words) // 2 :].count(top)]
    assert min(halves) > 0.7 * max(halves)


def test_counts_are_what_a_search_finds() -> None:
    seen = set()
    for sample in samples_of(count_words, 12):
        body, question = parts(sample)
        asked = question.split("numbers of ")[1].split(" in the text")[0].split(" , ")
        words = body.split()
        counts = {word: words.count(word) for word in asked}
        assert sample.answer == " , ".join(f"{w} is {n}" for w, n in counts.items()) + " ."
        seen |= set(counts.values())
    assert seen == set(range(1, 5))


def test_flagged_values_add_up() -> None:
    seen = set()
    for sample in samples_of(flagged_sum, 12):
        body, _ = parts(sample)
        total, said = 0, []
        for item in body.removesuffix(" ;").split(" ; "):
            adjective, noun, mark, digit = item.split()
            if mark == "!":
                total += int(digit)
                said.append(f"{adjective} {noun} {digit} = {total // 10} {total % 10}")
        assert sample.answer == " ; ".join(said) + " ."
        assert 2 <= len(said) <= 10
        seen.add(len(said))
    assert len(seen) > 5


def test_longest_list_is_three_times_as_long_as_the_next() -> None:
    seen = set()
    for sample in samples_of(longest_list, 12):
        body, _ = parts(sample)
        pieces = body.split("The list for ")[1:]
        lengths = {}
        for piece in pieces:
            words = piece.split()
            lengths[" ".join(words[:2])] = words.index(")") - words.index("(") - 1
        longest, second = sorted(lengths.values(), reverse=True)[:2]
        assert longest >= 3 * second
        assert sample.answer == max(lengths, key=lambda key: lengths[key]) + " ."
        seen.add(list(lengths).index(sample.answer.removesuffix(" .")))
    assert len(seen) > 3  # the longest is not always at the same place


def test_walk_follows_the_rules_and_keeps_its_values() -> None:
    kept = taken = 0
    for sample in samples_of(long_walk):
        body, question = parts(sample)
        rules = {}
        for rule in body.removesuffix(" ;").split(" ; "):
            left, right = rule.split(" > ")
            assert left not in rules
            rules[left] = right.rsplit(" ", 2)
        starts = re.findall(r"(\S+) at (\S+ \S+) = (\d)", question.split(" until ")[0])
        place = {name: at for name, at, _ in starts}
        value = {name: digit for name, _, digit in starts}
        said: list[str] = []
        while len(said) < len(sample.values):
            name = starts[len(said) % len(starts)][0]
            following, mark, digit = rules[place[name]]
            assert mark in "!:"
            value[name] = digit if mark == "!" else value[name]
            taken, kept = taken + (mark == "!"), kept + (mark == ":")
            said.append(f"{name} : {place[name]} > {following} = {value[name]}")
            place[name] = following
        assert sample.answer == " ; ".join(said) + " ."
        assert set(place.values()) == {"stop"}
    assert 0.3 < taken / (taken + kept) < 0.5


@pytest.mark.parametrize(("tokens", "least"), [(4096, 1500), (16384, 7000), (32768, 7000)])
def test_walks_are_long(tokens: int, least: int) -> None:
    sample = long_walk(tokens, random.Random(2), WORDS)
    assert least < sample.max_new_tokens <= output_tokens(tokens) <= 8192


def test_a_walk_is_judged_up_to_its_first_mistake() -> None:
    sample = long_walk(1024, random.Random(0), WORDS)
    steps = sample.answer.removesuffix(" .").split(" ; ")
    steps[10] = steps[10][:-1] + ("1" if steps[10][-1] != "1" else "2")
    assert judge(sample, " ; ".join(steps) + " .") == 10 / len(steps)
