"""The tasks of suite real: exact lengths, answers that stand in the prompt, measures, texts."""

import json
import random
import re

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.metrics import facts, fenced_code, record_fields, rouge_l
from penstock.evaluate.tasks.real.ground import PARTS, grounds_of
from penstock.evaluate.tasks.real.passages import FIDELITY, passages
from penstock.evaluate.tasks.real.registry import ANSWERED, ROOM, RealTasks
from penstock.evaluate.tasks.real.repository import functions_of
from penstock.evaluate.tasks.real.texts import ShippedTexts, SourceFile, read_shipped_texts
from penstock.evaluate.tasks.sample import Sample, judge

TOKENS = 8_000
WORD = re.compile(r"\w+")
pytestmark = pytest.mark.usefixtures("shipped_once")


@pytest.fixture(scope="module")
def tasks(bpe: TextTokenizer) -> RealTasks:
    return RealTasks(bpe, positions=32768)


@pytest.fixture(scope="module")
def texts() -> ShippedTexts:
    return read_shipped_texts()


def draw(tasks: RealTasks, task: str, count: int, *, seed: int = 3) -> list[Sample]:
    return tasks.draw(task, 0, count, tokens=TOKENS, seed=seed)


@pytest.mark.parametrize("task", ANSWERED)
def test_prompts_have_one_length_and_hold_their_answers(tasks: RealTasks, task: str) -> None:
    """A sample of every kind in a book, then in source code."""
    kinds = len(ANSWERED[task])
    for sample in draw(tasks, task, 2 * kinds):
        assert sample.token_ids is not None
        assert TOKENS - 1 <= len(sample.token_ids) <= TOKENS
        assert "<assistant>" in sample.prompt
        document, _, _ = sample.prompt.rpartition("\nQuestion: ")
        for value in sample.values:
            words = json.loads(value).values() if value.startswith('{"') else WORD.findall(value)
            assert {w for one in words for w in WORD.findall(str(one))} <= set(
                WORD.findall(document)
            ) | {"name", "town", "item", "count"}
        assert judge(sample, sample.answer) == 1.0
        assert judge(sample, " I do not know.") == pytest.approx(0.0, abs=0.1)
        assert 0.3 < judge(sample, sample.answer[: len(sample.answer) * 3 // 4]) < 1.0 or (
            len(sample.values) == 1
        )


def test_samples_follow_from_seed_and_number(tasks: RealTasks) -> None:
    both = draw(tasks, "extraction", 2)
    assert tasks.draw("extraction", 1, 1, tokens=TOKENS, seed=3) == both[1:]
    assert draw(tasks, "extraction", 1, seed=4) != both[:1]
    assert "# Delivery 3: carrier" in both[1].prompt
    assert "# Delivery 3: carrier" not in both[0].prompt


def test_a_prompt_leaves_positions_to_its_answer(bpe: TextTokenizer) -> None:
    [sample] = RealTasks(bpe, positions=4000).draw("single_2", 0, 1, tokens=8192, seed=0)
    assert sample.token_ids is not None
    assert len(sample.token_ids) == 4000 - ROOM


def test_what_cannot_be_asked_is_refused(tasks: RealTasks, bundled: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="no task is called 'magic'"):
        tasks.draw("magic", 0, 1, tokens=TOKENS, seed=0)
    with pytest.raises(ConfigError, match="has no depth"):
        tasks.draw("single_2", 0, 1, tokens=TOKENS, seed=0, depth=0.5)
    with pytest.raises(ConfigError, match="too short for this task"):
        tasks.draw("extraction", 0, 1, tokens=200, seed=0)
    with pytest.raises(ConfigError, match="no file is that small"):
        tasks.draw("repository", 0, 1, tokens=200, seed=0)
    with pytest.raises(ConfigError, match="no chat template"):
        RealTasks(bundled, positions=4096)


def test_a_cut_unit_ends_the_haystack(texts: ShippedTexts) -> None:
    for ground in grounds_of(texts):
        pieces = ground.hiding(["FACT"], random.Random(1))
        whole, half = pieces(3 * PARTS), pieces(3 * PARTS + PARTS // 2)
        assert len([one for one in whole if one != "FACT"]) == 3
        last = [one for one in half if one != "FACT"][-1]
        following = [one for one in pieces(4 * PARTS) if one != "FACT"][-1]
        assert following.startswith(last)
        assert 0 < len(last) < len(following)


def test_the_repository_lists_functions_and_methods_in_order() -> None:
    file = SourceFile(
        "a.py", "def f(a, /, b, *, c=1): pass\nclass C:\n    def g(self): pass\nx = 1"
    )
    assert [one.signature for one in functions_of(file)] == ["f(a, b, c)", "g(self)"]


def test_passages_are_held_out_text_of_exact_length(
    bpe: TextTokenizer, texts: ShippedTexts
) -> None:
    decode = bpe.decode  # type: ignore[attr-defined]
    for name, source in zip(FIDELITY, (texts.books, texts.code), strict=True):
        two = passages(name, texts, bpe, tokens=300, first=0, count=2, seed=1)
        assert [len(ids) for ids in two] == [300, 300]
        assert two[0] != two[1]
        text = decode(list(two[0]), skip_special_tokens=True)[:100]
        assert any(text in one for one in source)
    with pytest.raises(ConfigError, match=r"no passage of 9,000,000"):
        passages("fidelity_code", texts, bpe, tokens=9_000_000, first=0, count=1, seed=1)


# Measures -----------------------------------------------------------------------------------------


def test_fields_of_records() -> None:
    wanted = ['{"no": 1, "name": "Ana", "boxes": 7}', '{"no": 2, "name": "Bo", "boxes": 8}']
    assert record_fields(f"[{wanted[0]},\n{wanted[1]}]", wanted) == 1.0
    assert record_fields("{'no': '1', 'name': 'Ana', 'boxes': 7},", wanted) == 0.5
    assert record_fields('{"no": 1, "name": "Ana", "boxes": 8}', wanted) == 0.25
    repeated = '{"no": 1, "name": "Eve"} {"no": 1, "name": "Ana", "boxes": 7}'
    assert record_fields(repeated, wanted) == 0.0, "the first record of a key counts"
    assert record_fields('{"no": 2, "name": "Bo", "boxes": 8} {"no": 1, "na', wanted) == 0.5
    assert record_fields("{}, {1, 2}, {broken", wanted) == 0.0


def test_facts_are_kept_line_by_line() -> None:
    wanted = ["Ana\tlamp\t100", "Bo\tdoor\t200"]
    assert facts("- Ana (lamp): 100\n- Bo: 200 for a door", wanted) == 1.0
    assert facts("- Ana: 200, door\n- Bo: 100, lamp", wanted) == 0.0
    assert facts("Ana lamps 1000; Ana 100", wanted) == 0.25
    assert facts("f(a)\ng()", ["f\ta", "g", "h"]) == pytest.approx(2 / 3)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    assert rouge_l("The cat sat.", ["the cat sat"]) == 1.0
    assert rouge_l("a b c d", ["a x c"]) == pytest.approx(2 * 2 / 7)
    assert rouge_l("c a", ["a c"]) == pytest.approx(0.5)
    assert rouge_l("", ["a"]) == 0.0
    assert rouge_l("", [""]) == 1.0


def test_code_ends_at_its_fence() -> None:
    assert fenced_code("def f(): pass\n```\nThis does nothing.", ["def f(): pass\n```"]) == 1.0
    assert fenced_code("def g(): pass", ["def f(): pass\n```"]) == pytest.approx(2 / 3)
