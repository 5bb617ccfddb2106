"""The English tasks: oracles solve them from the prompt alone; lengths, depths, definitions."""

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, cast

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english import lexicon
from penstock.evaluate.tasks.english.filler import noise, prose
from penstock.evaluate.tasks.english.haystack import TextHaystack
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer, fit
from penstock.evaluate.tasks.english.registry import (
    ENGLISH_DEPTH_TASKS,
    ENGLISH_TASKS,
    make_english_sample,
)
from penstock.evaluate.tasks.sample import Sample, judge

FACT = re.compile(r"One (?:vault number|pass code) of (\S+) is (\S+)\.")


def facts(prompt: str) -> list[tuple[str, str]]:
    """All (key, value) pairs, in the document's order."""
    return FACT.findall(prompt)


def needle_answer(prompt: str) -> str:
    asked = re.search(r"Question: What (?:are all|is) the \D+? of (.+) in the text", prompt)
    assert asked is not None
    keys = re.split(r", | and ", asked.group(1))
    told = facts(prompt)
    return " ".join(value for wanted in keys for key, value in told if key == wanted)


def variables(prompt: str) -> str:
    document = prompt.rpartition("The text below")[2]
    asked = re.search(r"have the value (\d+) in the text", document)
    assert asked is not None
    found: list[str] = []
    for name, right in re.findall(r"VAR (\w+) = ([^.]+)\.", document):
        if right == asked.group(1) or right.removeprefix("VAR ") in found:
            found.append(name)
    return " ".join(found)


def word_counts(prompt: str) -> Counter[str]:
    document = prompt.rpartition("Here is a numbered list")[2].partition("Question:")[0]
    return Counter(re.findall(r"\d+\. (\w+)", document))


def common_words(prompt: str) -> str:
    return " ".join(word for word, _ in word_counts(prompt).most_common(10))


def coded_counts(prompt: str) -> Counter[str]:
    document = prompt.partition("in it.\n")[2].partition("Question:")[0]
    counts = Counter(document.split())
    del counts["..."]
    return counts


def frequent_words(prompt: str) -> str:
    return " ".join(word for word, _ in coded_counts(prompt).most_common(3))


def way(prompt: str) -> str:
    leads = dict(re.findall(r"^(\S+) leads to (.+)\.$", prompt, re.MULTILINE))
    place = re.findall(r"Start at (\S+) and", prompt)[0]
    steps = []
    while place != "the exit":
        place = leads[place]
        steps.append(place.removeprefix("the "))
    return " -> ".join(steps)


def counters(prompt: str) -> str:
    counts = {c: int(n) for c, n in re.findall(r"the (\w+) counter at (\d+)", prompt)}
    found = re.findall(r"In step (\d+), the (\w+) counter ([^.]+)\.", prompt)
    lines = []
    for step, colour, event in sorted(found, key=lambda event: int(event[0])):
        if copied := re.search(r"value of the (\w+) counter", event):
            counts[colour] = counts[copied.group(1)]
        else:
            sign, change = re.findall(r"goes (up|down) by (\d)", event)[0]
            counts[colour] += int(change) if sign == "up" else -int(change)
        lines.append(f"{step}: {colour} {counts[colour]}")
    return "; ".join(lines)


ORACLES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(
        [
            "single_1", "single_2", "single_3", "multi_key_1", "multi_key_2", "multi_key_3",
            "multi_value", "multi_query",
        ],
        needle_answer,
    ),
    "variable_tracking": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "pointer_chasing": way,
    "state_tracking": counters,
}  # fmt: skip

TOKENS = 2001
UNIT_TOKENS = {"multi_key_3": 80}  # most that a prompt may lack; a UUID has many tokens
each_task = pytest.mark.parametrize("task", ENGLISH_TASKS)


def sample_of(
    task: str, tokens: int, tokenizer: TextTokenizer, seed: int = 0, depth: float | None = None
) -> Sample:
    return _made_once(task, tokens, cast(Any, tokenizer), seed, depth)


@cache
def _made_once(
    task: str, tokens: int, tokenizer: TextTokenizer, seed: int, depth: float | None
) -> Sample:
    return make_english_sample(task, tokens, random.Random(seed), tokenizer, depth=depth)


@each_task
def test_an_oracle_finds_the_answer_in_the_prompt(task: str, bpe: TextTokenizer) -> None:
    for seed in (0, 1):
        sample = sample_of(task, TOKENS, bpe, seed)
        assert sample.task == task
        assert judge(sample, ORACLES[task](sample.prompt)) == 1.0
        assert judge(sample, sample.answer) == 1.0
        assert not sample.prompt.endswith(sample.answer)


@each_task
def test_a_wrong_answer_scores_less(task: str, bpe: TextTokenizer) -> None:
    sample = sample_of(task, TOKENS, bpe)
    other = sample_of(task, TOKENS, bpe, seed=1)
    assert judge(sample, other.answer) < 0.2
    spoilt = sample.answer.replace(sample.values[-1], "nothing")
    assert judge(sample, spoilt) == pytest.approx(1 - 1 / len(sample.values))


@each_task
def test_prompt_is_as_long_as_asked_and_never_longer(
    task: str, any_tokenizer: TextTokenizer
) -> None:
    sample = sample_of(task, TOKENS, any_tokenizer)
    length = len(any_tokenizer.encode(sample.prompt))
    assert TOKENS - UNIT_TOKENS.get(task, 64) < length <= TOKENS


@each_task
def test_same_seed_same_sample_other_seed_another(task: str, bpe: TextTokenizer) -> None:
    sample = sample_of(task, TOKENS, bpe)
    assert make_english_sample(task, TOKENS, random.Random(0), bpe, depth=None) == sample
    assert sample_of(task, TOKENS, bpe, seed=1).prompt != sample.prompt


@each_task
def test_the_answer_fits_into_the_new_tokens(task: str, any_tokenizer: TextTokenizer) -> None:
    sample = sample_of(task, TOKENS, any_tokenizer)
    needed = len(any_tokenizer.encode(sample.answer, add_special_tokens=False)) + 1
    assert needed <= sample.max_new_tokens


@pytest.mark.parametrize("task", sorted(ENGLISH_DEPTH_TASKS))
def test_depth_is_where_the_asked_needle_lies(task: str, bpe: TextTokenizer) -> None:
    for depth in (0.0, 0.25, 0.5, 0.9, 1.0):
        sample = sample_of(task, 3000, bpe, depth=depth)
        start = sample.prompt.index("\n\n") + 2
        end = sample.prompt.rindex("\n\nQuestion:")
        needle = sample.prompt.index(f"is {sample.values[0]}.", start)
        if depth in (0.0, 1.0):
            ahead, behind = sample.prompt[start:needle], sample.prompt[needle:end]
            assert (ahead if depth == 0.0 else behind).count(".") == depth
        assert (needle - start) / (end - start) == pytest.approx(depth, abs=0.03)
        assert sample.depth == depth
        assert judge(sample, ORACLES[task](sample.prompt)) == 1.0


def test_depth_moves_nothing_but_the_needle(bpe: TextTokenizer) -> None:
    shallow = sample_of("single_2", 3000, bpe, depth=0.1)
    deep = sample_of("single_2", 3000, bpe, depth=0.9)
    ((key, value),) = facts(deep.prompt)
    needle = f"One vault number of {key} is {value}. "
    assert needle in shallow.prompt
    assert shallow.prompt != deep.prompt
    assert shallow.prompt.replace(needle, "") == deep.prompt.replace(needle, "")


def test_depths_that_cannot_be(bpe: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="outside 0"):
        sample_of("single_2", 3000, bpe, depth=1.5)
    with pytest.raises(ConfigError, match="multi_value has no depth"):
        sample_of("multi_value", 3000, bpe, depth=0.5)


@pytest.mark.parametrize(
    ("task", "keys", "needles", "key_form", "value_form"),
    [
        ("single_1", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("single_2", 1, 1, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("single_3", 1, 1, r"[a-z]+-[a-z]+", r"[0-9a-f-]{36}"),
        ("multi_key_1", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("multi_value", 1, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
        ("multi_query", 4, 4, r"[a-z]+-[a-z]+", r"\d{7}"),
    ],
)
def test_needles_are_as_ruler_defines_them(
    task: str, keys: int, needles: int, key_form: str, value_form: str, bpe: TextTokenizer
) -> None:
    sample = sample_of(task, 3000, bpe)
    told = facts(sample.prompt)
    assert len(told) == needles
    assert len({key for key, _ in told}) == keys
    for key, value in told:
        assert re.fullmatch(key_form, key)
        assert re.fullmatch(value_form, value)
    assert len(sample.values) == (4 if task in ("multi_value", "multi_query") else 1)


@pytest.mark.parametrize(
    ("task", "form"), [("multi_key_2", r"[a-z]+-[a-z]+"), ("multi_key_3", r"[0-9a-f-]{36}")]
)
def test_a_haystack_of_needles(task: str, form: str, bpe: TextTokenizer) -> None:
    sample = sample_of(task, 5000, bpe)
    told = facts(sample.prompt)
    document = sample.prompt.split("\n\n")[1]
    assert len(told) == len(document.splitlines()) > 50
    assert len({key for key, _ in told}) == len({value for _, value in told}) == len(told)
    assert all(re.fullmatch(form, key) for key, _ in told)


def test_haystacks(bpe: TextTokenizer) -> None:
    noisy, written = (sample_of(task, 4000, bpe).prompt for task in ("single_1", "single_2"))
    assert noisy.count(noise().take(1)[0]) > 30
    assert noise().take(1)[0] not in written
    sentences = Counter(prose(random.Random(0)).take(2000))
    assert max(sentences.values()) < 20
    assert not re.search(r"\d", " ".join(sentences))
    assert prose(random.Random(1)).take(9) != prose(random.Random(2)).take(9)


def test_words_occur_as_often_as_ruler_says(bpe: TextTokenizer) -> None:
    for tokens, often, seldom in [(3000, 6, 1), (4096, 6, 1), (7500, 30, 3)]:
        sample = sample_of("common_words", tokens, bpe)
        counts = word_counts(sample.prompt)
        assert {counts[word] for word in sample.values} == {often}
        rest = [count for word, count in counts.items() if word not in sample.values]
        assert set(rest) == {seldom}
        assert len(sample.values) == 10
    assert len(rest) > 50
    with pytest.raises(ConfigError, match="too short"):
        sample_of("common_words", 500, bpe)


def test_coded_words_follow_the_squares_of_their_ranks(bpe: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="takes") as refused:
        sample_of("frequent_words", 60, bpe)
    shortest = int(re.findall(r"takes (\d+)", str(refused.value))[0])
    for tokens in (shortest + 60, 1000, 3000, 6000):
        sample = sample_of("frequent_words", tokens, bpe)
        ranked = coded_counts(sample.prompt).most_common()
        assert tuple(word for word, _ in ranked[:3]) == sample.values
        assert ranked[2][1] > ranked[3][1]
    for rank, (_, count) in enumerate(ranked[:5], start=2):
        assert count == pytest.approx(ranked[0][1] * 4 / rank**2, rel=0.1)


def test_variables_form_one_chain_with_an_example_in_front(bpe: TextTokenizer) -> None:
    sample = sample_of("variable_tracking", 2000, bpe)
    example, document = sample.prompt.split("The text below")[1:]
    assert len(re.findall(r"VAR [A-Z]{3} =", example)) == 5
    assert re.findall(r"VAR ([A-Z]{5}) =", document) == list(sample.values)
    assert variables(f"The text below{example}") == " ".join(
        re.findall(r"[A-Z]{3}", example.partition("Answer:")[2])
    )


@pytest.mark.parametrize("task", ["pointer_chasing", "state_tracking"])
@pytest.mark.parametrize(("tokens", "wanted"), [(4000, 250), (20000, 1000)])
def test_long_answers(task: str, tokens: int, wanted: int, bpe: TextTokenizer) -> None:
    sample = sample_of(task, tokens, bpe)
    length = len(bpe.encode(sample.answer, add_special_tokens=False))
    assert wanted - 20 < length <= wanted
    assert sample.metric == "leading_steps"


def test_steps_need_earlier_ones(bpe: TextTokenizer) -> None:
    way_sample = sample_of("pointer_chasing", 4000, bpe)
    lines = re.findall(r"^(\S+) leads to (.+)\.$", way_sample.prompt, re.MULTILINE)
    assert len({source for source, _ in lines}) == len(lines) > 2 * len(way_sample.values)
    assert [target for _, target in lines].count("the exit") == 1
    places = [source for source, _ in lines]
    on_way = [places.index(place) for place in way_sample.values[:-1]]
    assert any(a > b for a, b in pairwise(on_way))
    states = sample_of("state_tracking", 4000, bpe)
    steps = [int(step) for step in re.findall(r"In step (\d+),", states.prompt)]
    assert sorted(steps) == list(range(1, len(states.values) + 1)) != steps
    counts = [int(value.split()[-1]) for value in states.values]
    assert 0 <= min(counts) <= max(counts) <= 99
    assert "is set to the value of" in states.prompt


@each_task
def test_too_few_tokens_are_refused_with_what_it_takes(task: str, bpe: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"tokens=60 is too short.*takes \d+"):
        sample_of(task, 60, bpe)


def test_too_long_for_its_keys(monkeypatch: pytest.MonkeyPatch, bpe: TextTokenizer) -> None:
    monkeypatch.setattr(lexicon, "NOUNS", lexicon.NOUNS[:1])
    with pytest.raises(ConfigError, match="too long for this task"):
        sample_of("multi_key_2", 16000, bpe)


def test_unknown_task_is_refused(bpe: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"riddle.*single_1"):
        sample_of("riddle", 3000, bpe)


def test_chat_template_only_if_asked(bpe: TextTokenizer, bundled: TextTokenizer) -> None:
    plain = sample_of("single_2", 2000, bpe)
    assert "<user>" not in plain.prompt
    assert plain.token_ids is None
    chat = make_english_sample("single_2", 2000, random.Random(0), bpe, chat=True)
    assert chat.prompt.startswith("<s><user>\n")
    opened, _, lead = chat.prompt.partition("<assistant>\n")
    assert opened.endswith("in the text above?\n")
    assert lead.startswith("Answer: According")
    assert chat.token_ids is not None
    assert 1936 < len(chat.token_ids) <= 2000
    assert chat.token_ids.count(0) == 1  # <s>, from the template alone
    assert judge(chat, needle_answer(chat.prompt)) == 1.0
    with pytest.raises(ConfigError, match="no chat template"):
        make_english_sample("single_2", 2000, random.Random(0), bundled, chat=True)


def test_lexicon_has_no_doubles() -> None:
    assert len(set(lexicon.ADJECTIVES) | set(lexicon.NOUNS)) == len(lexicon.ADJECTIVES) + len(
        lexicon.NOUNS
    )


@pytest.mark.parametrize("limit", [10, 57, 1000, 30011])
def test_fit_finds_the_last_unit_that_fits(limit: int) -> None:
    rng = random.Random(limit)
    sizes = [10]
    for _ in range(5000):
        sizes.append(sizes[-1] + rng.choice([1, 5, 30]))
    asked: list[int] = []

    def measure(units: int) -> int:
        asked.append(units)
        return sizes[units]

    units = fit(limit, measure)
    assert sizes[units] <= limit < sizes[units + 1]
    assert len(asked) < 25
    assert fit(limit, lambda n: sizes[n], most=3) == min(units, 3)


REAL = (
    'A title\n\nMr. A. B. Smith came in. He said "No!" Then he left.\n\n'
    "It was late.\nA verse,\n\n3. The last one."
)


@each_task
def test_the_haystack_can_be_a_real_text(task: str, bpe: TextTokenizer) -> None:
    """Every task is solved in it too; those with prose hold the text, paragraphs kept."""
    haystack = TextHaystack([REAL, "Another text. It has one paragraph."])
    drawn = [
        make_english_sample(task, TOKENS, random.Random(seed), bpe, haystack=haystack)
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    for sample in drawn:
        answer = ORACLES[task](sample.prompt)
        assert judge(sample, answer) == 1.0
        assert len(bpe.encode(sample.prompt)) <= TOKENS
    made_up = sample_of(task, TOKENS, bpe)
    uses_prose = "Mr. A. B. Smith" in drawn[0].prompt
    assert uses_prose == (made_up.prompt != drawn[0].prompt)
    assert uses_prose == (task in PROSE_TASKS)
    assert ("\nA verse," in drawn[0].prompt) == uses_prose
    assert (made_up.answer, made_up.values) == (drawn[0].answer, drawn[0].values)


PROSE_TASKS = {
    "single_2", "single_3", "multi_key_1", "multi_value", "multi_query", "state_tracking"
}  # fmt: skip
