"""Going on with an earlier run's result: what must be the same, what may grow, what stays."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.regular_file import TEXT_BYTES_MAX, read_regular

Row = dict[str, Any]
Key = tuple[Any, ...]


def check_same(
    former: Mapping[str, Any], settings: Mapping[str, Any], names: Iterable[str],
    what: str = "resume",
) -> None:  # fmt: skip
    """Refuse a result that was made otherwise.

    Args:
        former, settings: of the result that is there, and of this run.
        names: settings that they must share.

    Raises:
        ConfigError: one of them differs.
    """
    for name in names:
        there, here = former.get(name), settings[name]
        if there != here:
            raise ConfigError(
                f"cannot {what}: the result was made with {name}={there}, not {here}; ask for the "
                "same, or name another --output"
            )


def grow(settings: dict[str, Any], former: Mapping[str, Any], names: Iterable[str]) -> None:
    """Let lists of settings say what either run was asked for, the former's first."""
    for name in names:
        kept = former[name]
        settings[name] = [*kept, *(one for one in settings[name] if one not in kept)]


def digest_of(paths: Iterable[str | Path]) -> str | None:
    """What tells texts apart whose paths no result shows; None without any.

    Args:
        paths: files, or folders of JSONL files.

    Raises:
        ConfigError: one cannot be read.
    """
    total = hashlib.sha256()
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        try:
            total.update(hashlib.sha256(read_regular(file, TEXT_BYTES_MAX)).digest())
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    return total.hexdigest()[:16] if files else None


class GroupedRows:
    """Rows of groups that are measured together and compared.

    A group of an earlier run that lacks what is asked for now, or in which something failed, is
    measured again whole; what it has stays until that is done.
    """

    def __init__(self, key_of: Callable[[Row], Key]) -> None:
        """Start without rows.

        Args:
            key_of: what tells rows apart.
        """
        self.rows: list[Row] = []
        self._key_of = key_of
        self._again: set[Key] = set()

    def take_up(self, rows: Sequence[Row], groups: Iterable[Collection[Key]]) -> None:
        """Keep an earlier run's rows.

        Args:
            groups: keys of every group that is asked for now.
        """
        self.rows = list(rows)
        good = {self._key_of(row) for row in rows if not _failed(row)}
        self._again = {key for keys in groups if not set(keys) <= good for key in keys}

    @property
    def done(self) -> set[Key]:
        """Keys of the rows that need not be measured."""
        return {self._key_of(row) for row in self.rows} - self._again

    def put(self, rows: Sequence[Row], keys: Collection[Key]) -> None:
        """Take a group's rows in place of those that it had.

        Args:
            keys: of the whole group.
        """
        self._again -= set(keys)
        self.rows = [row for row in self.rows if self._key_of(row) not in keys] + list(rows)


def _failed(row: Row) -> bool:
    """Whether trying again may help: what was refused would be refused again."""
    return "error" in row and not row.get("refused")
