"""Result: one measurement as one JSON document that says how it was made."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.atomic_write import FileKind, json_kind, require_own, write_atomically
from penstock.core.errors import ConfigError, StorageError
from penstock.core.regular_file import read_regular_text
from penstock.evaluate.machine import Facts, current_commit, describe_libraries, describe_machine
from penstock.workloads.recorded_stream import RECORDING

FORMAT = "penstock-result-1"
RESULT = json_kind("result of penstock bench", "penstock-result-")
_PATH_OPTIONS = (
    "-o", "--output", "--out", "--disk", "--store", "--model", "--memory-cgroup", "--haystack",
    "--data", "--figure",
)  # fmt: skip


@dataclass(kw_only=True)
class Result:
    """Settings, circumstances and figures of one run of a benchmark."""

    kind: str
    """"accuracy", "needles", "audit", "statistics", "throughput", "setting" or "peers"."""
    command: str
    settings: dict[str, Any]
    seed: int
    machine: Facts
    libraries: Facts
    commit: str
    date: str
    """UTC, ISO 8601, to the second."""
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, kind: str, arguments: Sequence[str], settings: dict[str, Any], *, seed: int,
        store: str = "auto", package: str = "penstock.evaluate",
    ) -> "Result":  # fmt: skip
        """Start a document: everything but the figures.

        Args:
            kind: also the module's name below `package`.
            arguments: of the command line; paths are left out.
            store: directory of the KV cache, for its file system.
            package: of the program, for the command that repeats it.
        """
        return cls(
            kind=kind,
            command=f"python -m {package}.{kind} {public_arguments(arguments)}".strip(),
            settings=settings,
            seed=seed,
            machine=describe_machine(store),
            libraries=describe_libraries(),
            commit=current_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the document, making its folder if need be; one that is there is replaced whole.

        Raises:
            ConfigError: the file that is there is no such document.
            StorageError: it cannot be written.
        """
        target = Path(path)
        require_own(target, RESULT, "--output")
        text = json.dumps(self.as_dict(), indent=1) + "\n"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(text, target)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Result":
        """Read a document back.

        Raises:
            ConfigError: the file is not one of ours.
        """
        try:
            content = json.loads(read_regular_text(path))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {path}: it is no JSON") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ConfigError(f"{path} is not a result of penstock bench")
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(f"{path} is not a whole result: {error}") from error


def result_file(path: str) -> str:
    """The type of `--output` for argparse: a file that a result may be written to.

    Raises:
        ArgumentTypeError: it is a file of something else.
    """
    return _own_file(path, RESULT)


def recording_file(path: str) -> str:
    """As `result_file`, for recorded selections."""
    return _own_file(path, RECORDING)


def _own_file(path: str, kind: FileKind) -> str:
    try:
        require_own(Path(path), kind, "the file")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def public_arguments(arguments: Sequence[str]) -> str:
    """A command line for others to repeat, with paths replaced by PATH."""
    shown, hide = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if hide:
            argument = "PATH" if _is_path(argument) else argument
        elif equals and name in _PATH_OPTIONS and _is_path(value):
            argument = f"{name}=PATH"
        hide = argument in _PATH_OPTIONS
        shown.append(argument)
    return " ".join(shown)


def without_path(arguments: Sequence[str], option: str, path: str | None) -> list[str]:
    """A command line that shows PATH in place of the path of one option."""
    shown = ["PATH" if argument == path else argument for argument in arguments]
    return [f"{option}=PATH" if word.startswith(f"{option}=") else word for word in shown]


def without_folder(store: str) -> str:
    """A store's description without its folder."""
    return " ".join(word for word in store.split(" ") if not word.startswith("/"))


def _is_path(value: str) -> bool:
    return "/" in value or "\\" in value
