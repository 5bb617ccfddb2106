"""Tasks from JSONL files: layouts, measures, cutting, and errors that name the line."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.jsonl import read_records, record_sample
from penstock.evaluate.tasks.sample import judge
from penstock.evaluate.tasks.source import FileTasks

PLAIN = {"context": "Ann has a cat.", "question": "What has Ann?", "answers": ["a cat", "cat"]}
LONGBENCH = {
    "input": "Who wrote it?", "context": "It was Bo.", "answers": ["Bo"], "length": 3,
    "dataset": "qasper", "language": "en", "all_classes": None, "_id": "0",
}  # fmt: skip


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_both_layouts(tmp_path: Path, bpe: TextTokenizer) -> None:
    path = write(tmp_path / "mine.jsonl", PLAIN, "", LONGBENCH)
    plain, long = read_records(path)
    assert (plain.task, long.task) == ("mine", "qasper")
    assert (plain.where, long.where) == (f"{path}:1", f"{path}:3")
    sample = record_sample(plain, bpe)
    assert sample.prompt == "Ann has a cat.\n\nQuestion: What has Ann?\nAnswer:"
    assert (sample.answer, sample.values, sample.metric) == ("a cat", ("a cat", "cat"), "token_f1")
    assert judge(sample, "The cat!") == 1.0
    assert judge(sample, "black cat") == pytest.approx(2 / 3)
    assert sample.max_new_tokens == 32
    assert record_sample(long, bpe).answer == "Bo"


def test_which_measure(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl", PLAIN, LONGBENCH | {"all_classes": ["Bo", "Cy"]},
        PLAIN | {"metric": "exact_match"},
    )  # fmt: skip
    by_default = [record.metric for record in read_records(path)]
    assert by_default == ["token_f1", "string_match_part", "exact_match"]
    asked = [record.metric for record in read_records(path, metric="string_match_all")]
    assert asked == ["string_match_all", "string_match_all", "exact_match"]
    with pytest.raises(ConfigError, match="no metric is called 'rouge'"):
        read_records(path, metric="rouge")


def test_a_folder_file_by_file(tmp_path: Path, bpe: TextTokenizer) -> None:
    write(tmp_path / "b.jsonl", PLAIN, PLAIN | {"question": "Who?"})
    write(tmp_path / "a.jsonl", PLAIN)
    write(tmp_path / "qasper_e.jsonl", LONGBENCH)  # LongBench's short form of the same data set
    write(tmp_path / "notes.txt", "not a task")
    source = FileTasks(tmp_path, bpe)
    assert source.names == ("a", "b", "qasper_e")
    drawn = source.draw("b", 1, 5, tokens=200, seed=0)
    assert ["Who?" in sample.prompt for sample in drawn] == [True]
    with pytest.raises(ConfigError, match="no task is called 'c'"):
        source.draw("c", 0, 1, tokens=200, seed=0)
    with pytest.raises(ConfigError, match="a has no depth"):
        source.draw("a", 0, 1, tokens=200, seed=0, depth=0.5)


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_context_loses_its_middle(tmp_path: Path, bpe: TextTokenizer, chat: bool) -> None:
    words = [f"word{number}" for number in range(3000)]
    line = PLAIN | {"context": " ".join(words)}
    [record] = read_records(write(tmp_path / "long.jsonl", line))
    sample = record_sample(record, bpe, tokens=500, chat=chat)
    length = len(bpe.encode(sample.prompt, add_special_tokens=not chat))
    assert 490 < length <= 500
    assert "word0 word1 " in sample.prompt
    assert " word2998 word2999\n\nQuestion: What has Ann?\nAnswer:" in sample.prompt
    assert "word1500 " not in sample.prompt
    assert (sample.token_ids is not None) == chat
    whole = record_sample(record, bpe, tokens=10**6)
    assert whole.prompt.startswith(" ".join(words))
    with pytest.raises(ConfigError, match=r"long\.jsonl:1: tokens=5 is too short"):
        record_sample(record, bpe, tokens=5)


def test_templates(tmp_path: Path, bpe: TextTokenizer) -> None:
    line = PLAIN | {"context": "{question} {context} {", "question": "A {context}?"}
    odd, empty = read_records(write(tmp_path / "t.jsonl", line, LONGBENCH | {"input": ""}))
    assert record_sample(odd, bpe).prompt == (
        "{question} {context} {\n\nQuestion: A {context}?\nAnswer:"
    )
    assert record_sample(empty, bpe).prompt == "It was Bo.\n\nAnswer:"
    asked = record_sample(odd, bpe, template="{question} Read: {context}")
    assert asked.prompt == "A {context}? Read: {question} {context} {"
    with pytest.raises(ConfigError, match=r"must hold \{context\} once"):
        record_sample(odd, bpe, template="{question}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "this is not JSON"),
        ("[1]", "a line must be an object"),
        ("[" * 100_000, "this JSON is nested too deeply|this is not JSON"),
        ({"context": "c", "answers": ["a"]}, r"question \(or input\) is missing"),
        ({"question": "q", "answers": ["a"]}, "context is missing"),
        (PLAIN | {"context": 7}, "context must be a text, not int"),
        (PLAIN | {"context": " "}, "context is empty"),
        (PLAIN | {"question": None}, "question must be a text, not NoneType"),
        (PLAIN | {"answers": []}, "answers must be a text or a list"),
        (PLAIN | {"answers": {"a": 1}}, "answers must be a text or a list"),
        (PLAIN | {"answers": ["a", 1]}, "every answer must be a text"),
        (PLAIN | {"answers": ""}, "every answer must be a text that is not empty"),
        (PLAIN | {"metric": "rouge"}, "no metric is called 'rouge'"),
        (PLAIN | {"dataset": 3}, "dataset must be a text, not int"),
        (PLAIN | {"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        (PLAIN | {"max_new_tokens": True}, "max_new_tokens must be a whole number"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: dict[str, Any] | str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", PLAIN, line, PLAIN)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: ({message})"):
        read_records(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.jsonl"):
        read_records(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        read_records(tmp_path)
    with pytest.raises(ConfigError, match="has no lines"):
        read_records(write(tmp_path / "blank.jsonl", "", " "))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(PLAIN).encode() + b"\n\xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.jsonl:2: this is not UTF-8"):
        read_records(latin)
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + json.dumps(PLAIN).encode() + b"\r\n")
    assert len(read_records(marked)) == 1


def test_one_answer_may_be_a_text_and_say_its_length(tmp_path: Path, bpe: TextTokenizer) -> None:
    line = PLAIN | {"answers": "cat", "max_new_tokens": 5}
    [record] = read_records(write(tmp_path / "one.jsonl", line))
    sample = record_sample(record, bpe)
    assert (sample.values, sample.also_right, sample.max_new_tokens) == (("cat",), (), 5)
