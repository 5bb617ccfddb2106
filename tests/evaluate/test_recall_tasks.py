"""The recall tasks: lengths, reproducibility, answers that follow from the documents, scores."""

import random
import re

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import TASKS, Sample, Words, judge, make_sample, score, score_any_order
from penstock.evaluate.tasks.documents import essay, hide, noise
from penstock.evaluate.tasks.recall import DEFAULT_TASKS, RECALL_2_TASKS

GRAMMAR = ["<pad>", "<bos>", "<eos>", "<unk>", "The", ".", ",", "?", ":", ";"]
ADJECTIVES = ["amber", *(f"b{i:03}" for i in range(200)), "zealous"]
NOUNS = ["acorn", *(f"m{i:03}" for i in range(300)), "zebra"]
COMMON = ["able", *(f"common{i:02}" for i in range(60)), "yet"]
VOCABULARY = {word: i for i, word in enumerate([*GRAMMAR, *ADJECTIVES, *NOUNS, *COMMON])}
BOS = 1


def sample_of(task: str, tokens: int, seed: int = 0) -> Sample:
    return make_sample(task, tokens, random.Random(seed), VOCABULARY)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [700, 1024, 4096])
def test_prompt_is_as_long_as_asked_and_never_longer(task: str, tokens: int) -> None:
    for seed in range(5):
        length = BOS + len(sample_of(task, tokens, seed).prompt.split())
        assert tokens - 16 < length <= tokens


FIXED = ("single_noise", "multi_key_full", "pointer_chasing", "two_walkers", "long_walk")


@pytest.mark.parametrize("task", [name for name in TASKS if name not in FIXED])
def test_essay_tasks_are_exact(task: str) -> None:
    assert BOS + len(sample_of(task, 1000).prompt.split()) == 1000


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_sample_other_seed_another(task: str) -> None:
    assert sample_of(task, 1024, 3) == sample_of(task, 1024, 3)
    assert sample_of(task, 1024, 3).prompt != sample_of(task, 1024, 4).prompt


@pytest.mark.parametrize("task", TASKS)
def test_answer_needs_its_tokens_and_the_end_of_sequence(task: str) -> None:
    sample = sample_of(task, 1024)
    assert sample.task == task
    assert sample.max_new_tokens == len(sample.answer.split()) + 1


@pytest.mark.parametrize(
    "task", ["single_noise", "single_essay", "multi_key_few", "multi_key_full", "multi_value"]
)
def test_values_stand_behind_the_asked_key_in_order(task: str) -> None:
    for seed in range(8):
        sample = sample_of(task, 1024, seed)
        document, question = sample.prompt.rsplit(" Question : ", 1)
        key = re.search(r"for (\S+ \S+) \?", question)
        assert key is not None
        found = re.findall(rf" for {key.group(1)} is ([^.]+) \.", document)
        assert tuple(found) == sample.values
        assert sample.answer == " , ".join(found) + " ."


def test_multi_query_answers_every_asked_key() -> None:
    sample = sample_of("multi_query", 1024)
    told = dict(re.findall(r" for (\S+ \S+) is ([^.]+) \.", sample.prompt))
    question = sample.prompt.rsplit(" Question : ", 1)[1]
    asked = re.search(r"for ([^?]+) \? Answer :$", question)
    assert asked is not None
    keys = asked.group(1).split(" , ")
    assert len(keys) == 4
    assert sample.answer == " , ".join(f"{key} is {told[key]}" for key in keys) + " ."


def test_variables_follow_from_the_assignments() -> None:
    sample = sample_of("variable_tracking", 1024, 5)
    document, question = sample.prompt.rsplit(" Question : ", 1)
    value = re.search(r"the value ((?:\d )+)\.", question)
    assert value is not None
    variables: list[str] = []
    for name, right in re.findall(r"VAR (\S+) = ([^.]+) \.", document):
        if right == value.group(1).strip() or right.removeprefix("VAR ") in variables:
            variables.append(name)
    assert sample.answer == " ".join(variables) + " ."
    assert len(variables) == 5


def test_path_follows_the_rules_to_the_stop() -> None:
    sample = sample_of("pointer_chasing", 1024)
    rules = dict(re.findall(r"(\S+ \S+) > (\S+ \S+|stop) ;", _rules_of(sample)))
    node = sample.prompt.split(" Answer : ")[1]
    steps = []
    while node != "stop":
        node = rules[node]
        steps.append(node)
    assert sample.answer == "".join(f"> {step} " for step in steps) + "."
    assert len(steps) == 66


def test_walkers_take_turns_along_the_rules() -> None:
    sample = sample_of("two_walkers", 1024)
    rules = dict(re.findall(r"(\S+ \S+) > (\S+ \S+|stop) ;", _rules_of(sample)))
    start = sample.prompt.split(" Answer : ")[1]
    steps = f"{start} {sample.answer}".removesuffix(" .").split(" ; ")
    for step in steps:
        _, node, following = re.split(r" : | > ", step)
        assert rules[node] == following
    assert [step.split()[0] for step in steps] == ["red", "blue"] * (len(steps) // 2)
    assert steps[-1].endswith("> stop")


def test_copy_repeats_the_list() -> None:
    sample = sample_of("copy", 1024)
    assert f"( {sample.answer} " in sample.prompt
    assert sample.prompt.endswith("Answer : (")


def _rules_of(sample: Sample) -> str:
    return sample.prompt.split(" . ", 2)[2].split(" Question : ")[0]


def test_filler_lengths() -> None:
    words = Words.of(VOCABULARY)
    for room in (3, 4, 7, 16, 17, 18, 333):
        text = " ".join(essay(room, words, random.Random(room)))
        assert len(text.split()) == room
    assert essay(2, words, random.Random(0)) == []
    assert len(" ".join(noise(24)).split()) == 24
    assert len(" ".join(noise(23)).split()) == 19


def test_hide_keeps_the_order_and_everything_else() -> None:
    sentences = [str(i) for i in range(20)]
    body = hide(["a", "b", "c"], sentences, random.Random(2))
    assert [part for part in body if part.isalpha()] == ["a", "b", "c"]
    assert [part for part in body if part.isdigit()] == sentences


def test_keys_differ_also_in_tight_pools() -> None:
    words = Words.of(VOCABULARY)
    for seed in range(30):
        for count in (1, 5, 700, 5000):
            keys = words.key_pool(random.Random(seed), count)
            assert len(set(keys)) == count


def test_exact_match_forgives_white_space_only() -> None:
    sample = Sample("multi_value", "", "good stone , quick ship .", 7, ("good stone", "quick ship"))
    assert score(sample, "  good stone ,\n quick ship . ") == 1.0
    assert score(sample, "good stone , quick ship") == 0.0
    assert score(sample, "quick ship , good stone .") == 0.0


def test_any_order_counts_whole_values() -> None:
    sample = Sample("multi_value", "", "1 2 , 3 4 .", 6, ("1 2", "3 4"))
    assert score_any_order(sample, "3 4 , 1 2 .") == 1.0
    assert score_any_order(sample, "3 4 , 5 1 .") == 0.5
    assert score_any_order(sample, "13 4") == 0.0
    english = Sample("multi_value", "", " 12, 34.", 6, ("12", "34"), "string_match_all")
    assert score_any_order(english, " 34, 12.") == 1.0
    assert score_any_order(english, " 12 and 345.") == 0.5


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"riddle.*single_noise"):
        sample_of("riddle", 1024)


def test_only_what_the_bundled_model_answers_is_asked_unasked() -> None:
    assert DEFAULT_TASKS == (
        "single_noise", "single_essay", "multi_key_few", "multi_key_full", "multi_value",
        "multi_query", "variable_tracking", "pointer_chasing", "two_walkers", "copy",
    )  # fmt: skip
    assert (*DEFAULT_TASKS, *RECALL_2_TASKS) == tuple(TASKS)


def test_the_tasks_of_recall_2_are_scored_by_what_was_said() -> None:
    most, longest, walk = (sample_of(task, 1024, 7) for task in RECALL_2_TASKS)
    document = most.prompt.split(" later . ")[1].split(" Question : ")[0].split()
    assert most.answer == f"{max(set(document) - {'.'}, key=document.count)} ."
    lists = re.findall(r"The list for (\S+ \S+) is \( ([^)]*) \)", longest.prompt)
    assert longest.answer == f"{max(lists, key=lambda one: len(one[1].split()))[0]} ."
    said = walk.answer.split(" ; ")
    assert judge(walk, walk.answer) == 1.0
    assert judge(walk, " ; ".join([*said[:3], "nothing", *said[4:]])) == 3 / len(said)


@pytest.mark.parametrize("task", TASKS)
def test_too_few_tokens_are_refused(task: str) -> None:
    with pytest.raises(ConfigError, match="too short"):
        sample_of(task, 20)


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigError, match="bundled model"):
        make_sample("copy", 1024, random.Random(0), {"hello": 0, "amber": 1})
