"""Texts that ship with the package, for any model: prose, code and dialogue of free licence."""

import importlib
import inspect
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"
"""`README.md` in it names the works and their licences."""
_MODULES = ("configparser", "difflib", "statistics")
MOST_UNKNOWN = 0.1
"""Share of a text that a tokenizer may have no words for."""


def prose() -> str:
    """A novel's beginning."""
    return (TEXTS / "prose.txt").read_text(encoding="utf-8")


def dialogue() -> str:
    """Turns of two speakers, a paragraph each."""
    return (TEXTS / "dialogue.txt").read_text(encoding="utf-8").strip()


def code() -> str:
    """Modules of the installed Python's standard library, one behind the other."""
    modules = (importlib.import_module(name) for name in _MODULES)
    return "\n\n".join(map(inspect.getsource, modules))


def unknown_share(ids: list[int], tokenizer: Any) -> float:
    """Share of tokens that stand for words which a tokenizer does not have."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return 0.0 if unknown is None or not ids else ids.count(unknown) / len(ids)
