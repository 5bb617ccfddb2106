"""Rows of training only: their answers follow from their documents, and there are many of them."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import training
from penstock.evaluate.tasks import Words
from training.checkpoint import read_vocabulary
from training.data import EOS, GENERATORS, RowMaker
from training.dense import DENSE
from training.questions import further_questions
from training.settings import Settings, read_settings

CONFIGS = Path(training.__file__).parent / "configs"
VOCABULARY = read_vocabulary()
WORDS = Words.of(VOCABULARY)


def toy() -> Settings:
    return read_settings(CONFIGS / "toy.toml")


@pytest.mark.parametrize("length", [272, 544])
def test_single_words_are_asked_for_much_in_short_rows(length: int) -> None:
    said = {}
    for task in ("copy", "dense_copy", "variable_tracking", "dense_chains"):
        maker = RowMaker(replace(toy(), mix={task: 1.0}), VOCABULARY)
        rows = [maker.row(length, f"d/{seed}") for seed in range(10)]
        said[task] = sum(int(row.is_answer.sum()) for row in rows)
    assert said["dense_copy"] > 10 * length // 4
    assert said["dense_copy"] > 3 * said["copy"]
    assert said["dense_chains"] > said["variable_tracking"]


def test_dense_answers_follow_from_their_rows() -> None:
    for seed in range(6):
        rng = random.Random(seed)
        sample = DENSE["dense_copy"][0](544, rng, WORDS)
        listed = sample.answer.removesuffix(" )")
        assert f"( {listed} )" in sample.prompt
        assert len(set(listed.split())) == len(listed.split())
        assert 1 + len(sample.prompt.split()) + sample.max_new_tokens <= 544
        sample = DENSE["dense_chains"][0](400, rng, WORDS)
        document, question = sample.prompt.rsplit(" Question : ", 1)
        asked = [(f"Question : {question}", sample.answer), *further_questions(sample, rng)]
        assert len(asked) * (9 + 7 * 4) <= 400
        for text, answer in asked:
            names = answer.removesuffix(" .").split()
            value, told = text.split("the value ")[1].split(" . Answer : ")
            assert told.startswith(f"{len(names)} variables")
            for name, source in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False):
                assert document.count(f"VAR {name} = {source} .") == 1
            assert f"= VAR {names[-1]} ." not in document


def test_lists_of_few_words_say_them_again_with_others_behind() -> None:
    for seed in range(10):
        sample = DENSE["alike_copy"][0](1088, random.Random(seed), WORDS)
        assert sample.task == "copy"
        listed = sample.answer.removesuffix(" )")
        assert f"( {listed} )" in sample.prompt
        assert 1 + len(sample.prompt.split()) + sample.max_new_tokens <= 1088
        said = listed.split()
        assert len(said) >= 2 * len(set(said)) - 1
        behind: dict[str, set[str]] = {word: set() for word in said}
        for word, follower in pairwise(said):
            behind[word].add(follower)
        assert sum(len(others) > 1 for others in behind.values()) > len(behind) * 0.5


def test_dense_values_are_all_those_of_their_keys_in_order() -> None:
    alike = 0
    for seed in range(8):
        rng = random.Random(seed)
        sample = DENSE["dense_values"][0](600, rng, WORDS)
        document, question = sample.prompt.rsplit(" Question : ", 1)
        asked = [(f"Question : {question}", sample.answer), *further_questions(sample, rng)]
        assert 2 <= len(asked) == len({text for text, _ in asked})
        for text, answer in asked:
            key = text.split(" for ")[1].split(" ?")[0]
            assert text.endswith(f"s for {key} are")
            values = [part.split(" .")[0] for part in document.split(f" for {key} is ")[1:]]
            assert answer == " , ".join(values) + " ."
            assert len(set(values)) == 4
            first_words = [value.split()[0] for value in values]
            alike += len(first_words) - len(set(first_words))
    assert alike > 10  # a way from one value into another


def test_alike_values_are_multi_value_with_much_in_common() -> None:
    same = {}
    for name, make in (
        ("multi_value", GENERATORS["multi_value"]),
        ("alike", DENSE["alike_values"][0]),
    ):
        same[name] = 0
        for seed in range(20):
            sample = make(600, random.Random(seed), WORDS)
            assert sample.task == "multi_value"
            values = [value.split() for value in sample.answer.removesuffix(" .").split(" , ")]
            assert len(values) == 4
            key = sample.prompt.split(" for ")[-1].split(" are")[0]
            told = [part.split(" .")[0] for part in sample.prompt.split(f" for {key} is ")[1:]]
            assert [" ".join(value) for value in values] == told
            same[name] += sum(
                a == b for v, w in pairwise(values) for a, b in zip(v, w, strict=True)
            )
    assert same["alike"] > 2 * same["multi_value"]


def test_dense_values_fill_their_rows_with_answers() -> None:
    said = {}
    for task in ("multi_value", "dense_values"):
        maker = RowMaker(replace(toy(), mix={task: 1.0}), VOCABULARY)
        rows = [maker.row(1088, f"v/{seed}") for seed in range(10)]
        said[task] = sum(int(row.is_answer.sum()) for row in rows)
    assert said["dense_values"] > 3 * said["multi_value"]


def followed(document: str, question: str) -> str:
    """The walk by its rules, line by line, told here in another way than in the bench."""
    rules = dict(re.findall(r"(\S+ \S+) > ((?:stop|\S+ \S+) [!:] \d) ;", document))
    walkers = re.findall(r"(\S+) at (\S+ \S+) = (\d)", question)
    lines = []
    while walkers:
        going = []
        for name, place, value in walkers:
            *to, mark, digit = rules[place].split()
            value = digit if mark == "!" else value
            lines.append(f"{name} : {place} > {' '.join(to)} = {value}")
            going += [(name, " ".join(to), value)] if to != ["stop"] else []
        walkers = going
    return " ; ".join(lines) + " ."


@pytest.mark.parametrize(("tokens", "counts"), [(500, {8}), (1000, {16}), (4000, {16, 32})])
def test_many_walkers_are_many(tokens: int, counts: set[int]) -> None:
    rng, seen = random.Random(1), set()
    for _ in range(12):
        sample = DENSE["many_walkers"][0](tokens, rng, WORDS)
        seen.add(sample.prompt[sample.prompt.index("Question") :].count(" at "))
        assert len(sample.prompt.split()) <= tokens
        assert len(sample.answer.split()) <= tokens / 2
    assert seen == counts


def test_short_walks_follow_their_rules_to_the_end() -> None:
    lengths, orders = set(), set()
    for seed in range(6):
        rng = random.Random(seed)
        sample = DENSE["short_walks"][0](600, rng, WORDS)
        document, question = sample.prompt.rsplit(" Question : ", 1)
        assert sample.answer == followed(document, question)
        for text, answer in further_questions(sample, rng):
            assert answer == followed(document, text)
            names = re.findall(r"(\S+) at ", text)
            lengths.add(answer.count(" = ") / len(names))
            orders.add(tuple(names))
    assert lengths == {1, 2, 3, 4}
    assert len(orders) > 20


def test_walks_of_training_end_and_set_values_more_often() -> None:
    ends, sets = {}, {}
    for task in ("long_walk", "short_walks", "dense_walk"):
        maker = RowMaker(replace(toy(), mix={task: 1.0}), VOCABULARY)
        rows = [maker.row(1088, f"w/{seed}") for seed in range(10)]
        ends[task] = sum(int((row.tokens == EOS).sum()) for row in rows)
        sets[task] = sum(int((row.tokens == VOCABULARY["!"]).sum()) for row in rows)
    assert ends["long_walk"] == ends["dense_walk"] == 10
    assert ends["short_walks"] > 50
    assert sets["dense_walk"] > 1.7 * sets["long_walk"]
