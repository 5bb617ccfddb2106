"""What methods say of a document, token by token, kept in files that many processes share."""

import dataclasses
import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.core.regular_file import open_regular
from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.machine import describe_machine

_MEANING = "decoded tokens of the output"
"""Of what a file holds; part of its name, since earlier files began before the output."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One method's answers to one document, behind each decoded token of the output."""

    likeliest: NDArray[np.int64]
    """[steps]"""
    nats: NDArray[np.float64]
    """What the text's own next token costs. [steps]"""


class DocumentTokens(NamedTuple):
    """What is read: a prompt, and the output that is forced behind it."""

    number: int
    ids: list[int]
    prompt: int
    """How many of them are the prompt."""


class Found(NamedTuple):
    """What was said, and what is known of the cache that said it."""

    trace: Trace
    known: dict[str, Any]


class TraceFolder:
    """One file for each method and document; its name has a digest of all that matters to it."""

    def __init__(self, folder: str | None, model: str, chunk: int) -> None:
        """Make the folder where it does not exist.

        Args:
            folder: None: nothing is kept and nothing found.
            chunk: tokens per forward pass of the prefill.

        Raises:
            ConfigError: the folder cannot be made.
        """
        self._folder = None if folder is None else Path(folder)
        self._model, self._chunk = model, chunk
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--traces cannot be a folder: {error}") from error

    def _path(self, setting: Setting, document: DocumentTokens) -> Path | None:
        if self._folder is None:
            return None
        options = sorted(dataclasses.asdict(setting.policy).items())
        read = [_MEANING, self._model, self._chunk, document.ids, document.prompt]
        what = [*read, setting.text, options, setting.memory]
        digest = hashlib.sha256(json.dumps(what, default=str).encode())
        name = f"{self._model}-{document.number}-{setting.policy.name}-{digest.hexdigest()[:16]}"
        return self._folder / f"{name}.npz"

    def find(self, setting: Setting, document: DocumentTokens) -> Found | None:
        """What the method said of the document, if that is there.

        Raises:
            ConfigError: the file is there and cannot be read.
        """
        path = self._path(setting, document)
        if path is None or not path.exists():
            return None
        try:
            with open_regular(path) as file, np.load(file) as kept:
                trace = Trace(kept["likeliest"], kept["nats"])
                return Found(trace, json.loads(str(kept["known"])))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path.name} of --traces cannot be read; delete it") from error

    def keep(self, setting: Setting, document: DocumentTokens, found: Found) -> None:
        """Write a file; somebody who looks meanwhile sees all of it or none."""
        path = self._path(setting, document)
        if path is None:
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as file:
            np.savez_compressed(
                file, likeliest=found.trace.likeliest, nats=found.trace.nats,
                known=np.array(json.dumps(found.known | {"cpu": describe_machine()["cpu"]})),
            )  # fmt: skip
        partial.replace(path)
