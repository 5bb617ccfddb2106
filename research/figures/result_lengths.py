"""Accuracy results for figures: one for each prompt length, and which settings are unfinished."""

from dataclasses import replace
from typing import Any

from penstock.evaluate.result import Result


def by_length(result: Result) -> list[Result]:
    """Split an accuracy result by the length of its prompts, shortest first.

    Returns:
        One result for each length, its `settings["tokens"]` that length; the result itself where
        neither cells nor summary say for which length they are.
    """
    lengths = sorted({length for row in result.figures["summary"] if (length := _length(row))})
    if not lengths:
        return [result]
    return [
        replace(
            result,
            settings={**result.settings, "tokens": length},
            figures={
                **result.figures,
                **{
                    name: [row for row in result.figures[name] if _length(row) in (length, None)]
                    for name in ("cells", "summary")
                },
            },
        )
        for length in lengths
    ]


def answered_in_part(result: Result) -> set[str]:
    """Settings that answered fewer tasks than the one with the most: not for comparing means."""
    tasks = {row["setting"]: row.get("tasks") or 0 for row in result.figures["summary"]}
    most = max(tasks.values(), default=0)
    return {setting for setting, count in tasks.items() if 0 < count < most}


def _length(row: dict[str, Any]) -> int | None:
    """The prompt length of a cell or a summary; a cell's "tokens" are those it decoded."""
    length = row.get("length", row.get("tokens") if "task" not in row else None)
    return None if length is None else int(length)
