"""Lookup tables of KVSwap's parameters: reuse rates and quality, measured once for a model.

Source: KVSwap (arXiv 2511.11907), appendix A.1. They depend on the model and its text, not on the
hardware, so that they can be made anywhere. The paper keeps the reuse rate by capacity, on 20
batches of C4, and the adapter by compression ratio; here one adapter serves all ratios (a lower
rank takes its strongest components), and the divergence from full attention is kept instead.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import log2
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

import penstock.models
from penstock.core.atomic_write import json_kind, write_atomically
from penstock.core.errors import ConfigError, StorageError
from penstock.core.plain_data import fits
from penstock.core.regular_file import read_regular_text
from penstock.models.loader import BUNDLED

FORMAT = "penstock-tables-1"
TABLES = json_kind("tables of penstock tune", "penstock-tables-")
CAPACITIES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Tokens that the slots of a layer hold, as multiples of a selection."""
_SHIPPED = Path(penstock.models.__file__).parent / BUNDLED / "tuning_tables.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """One setting of KVSwap with slots for one selection."""

    group_tokens: int
    selected_tokens: int
    rank: int
    index_bits: int
    kl: float
    """See `Fidelity`, in nats."""
    kl_p90: float
    agreement: float
    reuse: tuple[float, ...]
    """Share of the selected groups that the slots would have, by `CAPACITIES`."""


@dataclass(frozen=True, kw_only=True)
class LookupTables:
    """Entries that differ from the first, the default, in group and selection or in the index."""

    model: str
    """What it was called."""
    fingerprint: str
    tokens: int
    """Of the longest text."""
    texts: str
    """What the texts are, how many and how long."""
    entries: tuple[TableEntry, ...]

    def reuse_rate(self, group_tokens: int, selected_tokens: int, capacity_tokens: int) -> float:
        """Share of the selected groups that slots of this size have.

        Between the measured values of each parameter it is interpolated; outside them the nearest
        measured one stands.

        Args:
            group_tokens: the paper's G.
            selected_tokens: the paper's MG.
            capacity_tokens: the paper's C, in tokens.

        Returns:
            0 to 1; 0 for less than one selection.
        """
        share = capacity_tokens / selected_tokens
        if share < 1:
            return 0.0

        def rate(entry: TableEntry) -> float:
            return float(np.interp(share, CAPACITIES, entry.reuse))

        points = {
            (entry.group_tokens, entry.selected_tokens): rate(entry) for entry in self._selections
        }
        return interpolated(points, group_tokens, selected_tokens)

    def kl(self, group_tokens: int, selected_tokens: int, rank: int, index_bits: int) -> float:
        """Divergence from full attention to expect, in nats.

        What the group and the selection add to the default's and what the index adds were measured
        one at a time, and are added up. Interpolated as in `reuse_rate`; 16 bits count as 8.
        """
        default = self.entries[0].kl
        selection = interpolated(
            {(e.group_tokens, e.selected_tokens): e.kl for e in self._selections},
            group_tokens, selected_tokens,
        )  # fmt: skip
        index = interpolated(
            {(e.rank, e.index_bits): e.kl for e in self._indexes}, rank, index_bits
        )
        return max(0.0, selection + index - default)

    @cached_property
    def _selections(self) -> list[TableEntry]:
        """Entries with the default's index."""
        first = self.entries[0]
        like = (first.rank, first.index_bits)
        return [entry for entry in self.entries if (entry.rank, entry.index_bits) == like]

    @cached_property
    def _indexes(self) -> list[TableEntry]:
        """Entries with the default's group and selection."""
        first = self.entries[0]
        like = (first.group_tokens, first.selected_tokens)
        return [e for e in self.entries if (e.group_tokens, e.selected_tokens) == like]

    # Files ------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the tables as JSON.

        Raises:
            StorageError: the file cannot be written.
        """
        about = {k: v for k, v in asdict(self).items() if k != "entries"}
        lines = ",\n".join("  " + json.dumps(asdict(entry)) for entry in self.entries)
        head = json.dumps({"format": FORMAT, **about}, indent=1).removesuffix("\n}")
        try:
            write_atomically(f'{head},\n "entries": [\n{lines}\n ]\n}}\n', Path(path))
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "LookupTables":
        """Read tables.

        Raises:
            ConfigError: the file is missing, or not whole tables of this format.
        """
        try:
            content = json.loads(read_regular_text(path))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot read the lookup tables {path}: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read the lookup tables {path}: they are no JSON") from error
        found = content.pop("format", None) if isinstance(content, dict) else None
        if found != FORMAT:
            raise ConfigError(
                f"{path} holds no lookup tables of the format {FORMAT} (found: {found}); make "
                "them again"
            )
        entries = content.pop("entries", None)
        about = {k: v for k, v in get_type_hints(cls).items() if k != "entries"}
        if not (
            _is_whole(content, about)
            and isinstance(entries, list)
            and entries
            and all(_is_whole(each, get_type_hints(TableEntry)) for each in entries)
            and all(len(each["reuse"]) == len(CAPACITIES) for each in entries)
        ):
            raise ConfigError(f"{path} holds no whole lookup tables; make them again")
        made = tuple(TableEntry(**{**each, "reuse": tuple(each["reuse"])}) for each in entries)
        tables = cls(**content, entries=made)
        selections = [(each.group_tokens, each.selected_tokens) for each in tables._selections]
        indexes = [(each.rank, each.index_bits) for each in tables._indexes]
        if not (_is_grid(selections) and _is_grid(indexes)):
            raise ConfigError(f"{path} holds lookup tables with gaps; make them again")
        return tables


def _is_whole(value: object, hints: dict[str, Any]) -> bool:
    """Whether plain data has exactly these fields, each of its type."""
    return (
        isinstance(value, dict)
        and value.keys() == hints.keys()
        and all(fits(value[name], hint) for name, hint in hints.items())
    )


def _is_grid(points: list[tuple[int, int]]) -> bool:
    """Whether `interpolated` can be asked: every x with every y, all of them above zero."""
    columns, rows = ({point[axis] for point in points} for axis in (0, 1))
    return len(set(points)) == len(columns) * len(rows) and min(*columns, *rows) > 0


def interpolated(points: dict[tuple[int, int], float], x: int, y: int) -> float:
    """A value between those of a full grid, linear in the logarithms; at the edge outside it."""
    columns = sorted({x for x, _ in points})
    rows = sorted({y for _, y in points})
    by_row = [
        np.interp(log2(x), [log2(c) for c in columns], [points[c, row] for c in columns])
        for row in rows
    ]
    return float(np.interp(log2(y), [log2(row) for row in rows], by_row))


def shipped_tables(model_fingerprint: str) -> LookupTables | None:
    """The tables that come with this package for a model, if there are any."""
    if not _SHIPPED.is_file():
        return None
    tables = LookupTables.load(_SHIPPED)
    return tables if tables.fingerprint == model_fingerprint else None
