"""Questions about long documents from JSONL files, LongBench's among them.

One object a line: `context`, `question` (or `input`) and `answers`, a list of texts of which
each is right, or one text. What else LongBench's lines hold is used or left alone: `dataset`
names the task, `all_classes` picks the measure, `length` is not needed. Two optional fields are
our own: `metric` and `max_new_tokens`.

Source: Bai et al., "LongBench" (ACL 2024), for the layout and for cutting contexts in the middle.
Differences: its prompts are not included (give a `template`), nor are Rouge, its code measure
and its score for classes; see `read_records`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.regular_file import TEXT_BYTES_MAX, read_regular
from penstock.evaluate.tasks.english.prompt_fit import Prompter, TextTokenizer, fit
from penstock.evaluate.tasks.metrics import metric_called
from penstock.evaluate.tasks.sample import Sample

TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"
TEMPLATE_WITHOUT_QUESTION = "{context}\n\nAnswer:"
_FEWEST_NEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of a file.

    Attributes:
        task: LongBench's `dataset`, else the file's name without its ending.
        where: `file:line`, for messages.
        context: the document.
        question: may be empty.
        answers: at least one.
        metric: a name of `METRICS`.
        max_new_tokens: None: a half more than the longest answer, at least 32.
    """

    task: str
    where: str
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int | None = None


def read_records(path: str | Path, *, metric: str | None = None) -> list[Record]:
    """Read a file, or all `*.jsonl` files of a folder by name; blank lines are skipped.

    Args:
        path: file or folder. UTF-8.
        metric: for lines that name none. None: `string_match_part` where a line has
            `all_classes` (the class is named; LongBench divides by the number of classes
            named), else `token_f1` (LongBench's own for its English questions).

    Raises:
        ConfigError: nothing there, or a line is not usable; names file and line.
    """
    if metric is not None:
        metric_called(metric)
    root = Path(path)
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    if not files:
        raise ConfigError(f"there is no .jsonl file in {root}")
    records: list[Record] = []
    for file in files:
        found = _read_file(file, metric)
        if not found:
            raise ConfigError(f"{file} has no lines")
        records.extend(found)
    return records


def record_sample(
    record: Record,
    tokenizer: TextTokenizer,
    *,
    tokens: int | None = None,
    chat: bool = False,
    template: str | None = None,
) -> Sample:
    """Make a sample of a record.

    Args:
        record: the line.
        tokenizer: of the model that will be asked.
        tokens: most tokens of the prompt, special tokens included; a longer context loses its
            middle. None: no limit.
        chat: wrap the prompt into the tokenizer's chat template.
        template: text with `{context}` once and `{question}`; None: `TEMPLATE`, without its
            question where that is empty.

    Raises:
        ConfigError: `tokens` does not even hold the question, the template has no `{context}`,
            or there is no chat template.
    """
    if template is None:
        template = TEMPLATE if record.question else TEMPLATE_WITHOUT_QUESTION
    if template.count("{context}") != 1:
        raise ConfigError(f"the template must hold {{context}} once: {template!r}")
    ahead, behind = (
        part.replace("{question}", record.question) for part in template.split("{context}")
    )
    prompter = Prompter(tokenizer, chat=chat)

    def prompt_with(characters: int) -> str:
        return prompter.render(f"{ahead}{_without_middle(record.context, characters)}{behind}", "")

    def measure(characters: int) -> int:
        return len(prompter.ids(prompt_with(characters)))

    kept = len(record.context)
    if tokens is not None and measure(kept) > tokens:
        try:
            kept = fit(tokens, measure, most=kept - 1)
        except ConfigError as error:
            raise ConfigError(f"{record.where}: {error}") from error
    prompt = prompt_with(kept)
    longest = max(prompter.count_answer(answer) for answer in record.answers)
    return Sample(
        task=record.task, prompt=prompt, answer=record.answers[0],
        max_new_tokens=record.max_new_tokens or max(_FEWEST_NEW_TOKENS, longest * 3 // 2 + 1),
        values=record.answers, metric=record.metric, also_right=record.answers[1:],
        token_ids=tuple(prompter.ids(prompt)) if chat else None,
    )  # fmt: skip


def _without_middle(text: str, characters: int) -> str:
    """The first and the last half of so many characters."""
    if characters >= len(text):
        return text
    last = characters // 2
    return text[: characters - last] + text[len(text) - last :]


def _read_file(file: Path, metric: str | None) -> list[Record]:
    try:
        content = read_regular(file, TEXT_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    records = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            where = f"{file}:{number}"
            try:
                records.append(_record(json.loads(line.decode("utf-8")), file, where, metric))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: this is not UTF-8 text") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: this is not JSON: {error.msg}") from error
            except RecursionError as error:
                raise ConfigError(f"{where}: this JSON is nested too deeply") from error
    return records


def _record(line: Any, file: Path, where: str, metric: str | None) -> Record:
    if not isinstance(line, dict):
        raise ConfigError(f"{where}: a line must be an object with context, question and answers")
    question_field = "question" if "question" in line else "input"
    if question_field not in line:
        raise ConfigError(f"{where}: question (or input) is missing")
    context = _text(line, "context", where)
    if not context.strip():
        raise ConfigError(f"{where}: context is empty")
    named = line.get("metric")
    if named is None:
        named = metric or ("string_match_part" if line.get("all_classes") else "token_f1")
    try:
        metric_called(str(named))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Record(
        task=_task(line, file, where),
        where=where,
        context=context,
        question=_text(line, question_field, where),
        answers=_answers(line, where),
        metric=str(named),
        max_new_tokens=_count(line, "max_new_tokens", where),
    )


def _task(line: Mapping[str, Any], file: Path, where: str) -> str:
    """The data set's name, or the file's where it begins with that (`qasper_e` and `qasper`)."""
    if line.get("dataset") is None:
        return file.stem
    name = _text(line, "dataset", where)
    return file.stem if file.stem.startswith(name) else name


def _text(line: Mapping[str, Any], name: str, where: str) -> str:
    if name not in line:
        raise ConfigError(f"{where}: {name} is missing")
    value = line[name]
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text, not {type(value).__name__}")
    return value


def _answers(line: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = line.get("answers")
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers:
        raise ConfigError(f"{where}: answers must be a text or a list of at least one")
    for answer in answers:
        if not isinstance(answer, str) or not answer.strip():
            raise ConfigError(f"{where}: every answer must be a text that is not empty")
    return tuple(answers)


def _count(line: Mapping[str, Any], name: str, where: str) -> int | None:
    value = line.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1")
    return value
