"""The records of documents as rows: accuracy with its interval by method and number of beams."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.evaluate.intervals import bootstrap_mean, paired_bootstrap, wilson
from research.search_accuracy.searches import (
    BEST_LOGPROB,
    BEST_VERIFIED,
    GREEDY,
    LOGPROB_SEARCH,
    SINGLE,
    VERIFIED,
)

METHODS = (VERIFIED, BEST_VERIFIED, LOGPROB_SEARCH, BEST_LOGPROB)
"""Those with a number of beams."""
PAIRS = ((VERIFIED, BEST_VERIFIED), (VERIFIED, LOGPROB_SEARCH), (VERIFIED, BEST_LOGPROB))
GREEDY_TEMPERATURE = 0.0


def summarise(records: Sequence[dict[str, Any]], beams: Sequence[int]) -> dict[str, Any]:
    """Rows, references and differences of all documents that are done, by temperature.

    Returns:
        `rows`: for a temperature, method and number of beams the share of documents whose path is
        right from end to end (`accuracy`, with its 95 % interval `low` to `high`, Wilson's) and
        the mean number of `hops` before the first mistake. `references`: greedy, the same way; and
        single samples, all of every document's, their interval from documents drawn anew.
        `differences`: of two methods on the same documents, from the paired bootstrap.
        `small_memory`: the searches that were run twice, taken together; None without any.
    """
    temperatures = sorted({one["temperature"] for one in records} - {GREEDY_TEMPERATURE})
    rows, references, differences = [], [], []
    greedy = [one for one in records if one["temperature"] == GREEDY_TEMPERATURE]
    if greedy:
        references.append({"temperature": GREEDY_TEMPERATURE, **_row(greedy, GREEDY, 0)})
    for temperature in temperatures:
        mine = [one for one in records if one["temperature"] == temperature]
        references.append({"temperature": temperature, **_single(mine)})
        for at, count in enumerate(beams):
            for method in METHODS:
                row = {"temperature": temperature, "beams": count, **_row(mine, method, at)}
                rows.append(row)
            for first, second in PAIRS:
                difference = paired_bootstrap((_right(mine, first, at), _right(mine, second, at)))
                differences.append({
                    "temperature": temperature, "beams": count, "first": first, "second": second,
                    **asdict(difference),
                })  # fmt: skip
    return {
        "rows": rows, "references": references, "differences": differences,
        "small_memory": _small_memory(records),
    }  # fmt: skip


def _row(records: Sequence[dict[str, Any]], method: str, at: int) -> dict[str, Any]:
    right = sum(_right(records, method, at))
    estimate = wilson(right, len(records))
    hops = [one["methods"][method]["hops"][at] for one in records]
    return {
        "method": method, "right": right, "documents": len(records), "accuracy": estimate.value,
        "low": estimate.low, "high": estimate.high, "hops": sum(hops) / len(hops),
    }  # fmt: skip


def _single(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All samples of all documents; samples of one document are not independent."""
    rights = [one["methods"][SINGLE]["right"] for one in records]
    hops = [count for one in records for count in one["methods"][SINGLE]["hops"]]
    estimate = bootstrap_mean([sum(one) / len(one) for one in rights])
    return {
        "method": SINGLE, "right": sum(map(sum, rights)), "documents": len(records),
        "samples": sum(map(len, rights)), "accuracy": estimate.value, "low": estimate.low,
        "high": estimate.high, "hops": sum(hops) / len(hops),
    }  # fmt: skip


def _right(records: Sequence[dict[str, Any]], method: str, at: int) -> list[int]:
    return [int(one["methods"][method]["right"][at]) for one in records]


def _small_memory(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    again = [one["small_memory"] for one in records if "small_memory" in one]
    if not again:
        return None
    return {
        "searches": len(again),
        **{name: sum(one[name] for one in again) for name in ("same_answer", "same_tree", "right")},
        **{
            name: max(one[name] for one in again)
            for name in ("limit_bytes", "full_bytes", "most_groups", "beams")
        },
        **{
            name: sum(one[name] for one in again) / len(again)
            for name in ("loaded_bytes", "written_bytes")
        },
        "store": again[0]["store"],
    }
