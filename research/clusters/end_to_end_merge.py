"""Results of `clusters.end_to_end` that several processes or machines made, in one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same, grow
from research.clusters.end_to_end_run import key_of
from research.clusters.end_to_end_table import summary

KIND = "clusters.end_to_end"
SHARED = (
    "model", "text", "digest", "warm", "rounds", "steps", "threads", "chunk", "cache_ratio", "seed",
)  # fmt: skip
"""Settings that results which become one must have in common."""
GROWING = ("lengths", "ratios", "devices", "methods")
"""Settings that may differ: a result then has what either run was asked for."""


def merged(out: str | Path, pieces: Sequence[str]) -> Result:
    """The result in `out` (where there is one) with the groups of others that it lacks.

    Rows of one group stay together, since they are compared. What another machine measured says so
    (`machine` of a row), and step times are not followed from one machine to another.

    Args:
        out: not written here.
        pieces: files; of a group that several have, the first counts.

    Raises:
        ConfigError: a file is not such a result, or was made with other settings.
    """
    paths = [path for path in (str(out), *pieces) if path != str(out) or Path(path).exists()]
    results = [Result.load(path) for path in paths]
    for path, one in zip(paths, results, strict=True):
        if one.kind != KIND:
            raise ConfigError(f"{Path(path).name} is a result of {one.kind}, not of {KIND}")
    base, *others = results
    base.settings.setdefault("digest", None)  # older results have none
    rows: list[dict[str, Any]] = list(base.figures["rows"])
    minutes = base.figures["minutes"]
    for other in others:
        check_same(other.settings, base.settings, SHARED, "merge")
        grow(base.settings, other.settings, GROWING)
        held = {_group(row) for row in rows}
        place = {} if _place(other) == _place(base) else {"machine": _place(other)}
        rows += [row | place for row in other.figures["rows"] if _group(row) not in held]
        minutes += other.figures["minutes"]
        base.figures["disk"] = base.figures["disk"] or other.figures["disk"]
    rows.sort(key=lambda row: (row["section"], row["length"]))
    base.figures |= {"rows": rows, **summary(rows), "minutes": minutes}
    return base


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows that were measured in turn have in common."""
    return key_of(row)[:-2]


def _place(result: Result) -> str:
    """The machine of a result, in words."""
    return f"{result.machine['cpu']}, {result.machine['cores']} cores"
