"""Released models: too large for the package, known by name once they have been fetched."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.core.errors import ConfigError

_TABLE = Path(__file__).parent / "released.toml"

BUNDLED_NAME = "recall-2"
"""What the model that comes with the package as `recall` is called among its like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """One released model."""

    name: str
    file: str
    """Name of the archive."""
    bytes: int
    """Its size."""
    sha256: str
    """Its sum, in hexadecimal digits."""
    files: int
    """How many files it holds, at most."""
    unpacked_bytes: int
    """And their bytes."""
    url: str
    """Where it is; empty if it has no address of its own."""
    train: str
    """The command that makes the model anew."""

    @property
    def folder(self) -> Path:
        """Where it lies once it has been fetched."""
        return models_folder() / self.name

    @property
    def is_fetched(self) -> bool:
        """Whether it is there, and may be looked at (`Path.is_file` would raise)."""
        return os.path.isfile(self.folder / "config.json")


def released_models() -> Mapping[str, Released]:
    """Every released model by name."""
    content = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    wanted = {field.name for field in fields(Released)} - {"name"}
    for name, entry in content.items():
        assert set(entry) == wanted, (name, sorted(wanted ^ set(entry)))
    return {name: Released(name=name, **entry) for name, entry in content.items()}


def released_model(name: str) -> Released:
    """The released model of that name.

    Raises:
        ConfigError: there is none, or it is the bundled one.
    """
    if name == BUNDLED_NAME:
        raise ConfigError(f"{name} comes with the package: nothing to fetch, its name is recall")
    known = released_models()
    if name not in known:
        there = f"there are {', '.join(known)}" if known else "none has been released yet"
        raise ConfigError(
            f"no released model is called {name!r}; {there} (training/README.md in the "
            "repository says how models are trained)"
        )
    return known[name]


def models_folder() -> Path:
    """The user's folder for fetched models."""
    return Path.home() / ".local" / "share" / "penstock" / "models"
