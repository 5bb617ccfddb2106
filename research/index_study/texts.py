"""Texts of the study: prose that ships with the package, source code of Python's own library."""

import sysconfig
from pathlib import Path

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.prompts import encode, read_text_file
from penstock.models.loader import LoadedModel
from penstock.tuner.shipped_texts import TEXTS

_MODULES = ("argparse.py", "tarfile.py", "typing.py", "inspect.py", "subprocess.py")


def text_named(name: str) -> str:
    """A text by its name: prose, code, or NAME=FILE.

    Raises:
        ConfigError: there is no such text.
        PromptError: the file cannot be read.
    """
    _, given, path = name.partition("=")
    if given:
        return read_text_file(path, "text")
    if name == "prose":
        return (TEXTS / "prose.txt").read_text(encoding="utf-8")
    if name == "code":
        folder = Path(sysconfig.get_path("stdlib"))
        return "\n\n".join((folder / file).read_text(encoding="utf-8") for file in _MODULES)
    raise ConfigError(f"no text is called {name!r}: say prose, code, or NAME=FILE")


def tokens_of_text(loaded: LoadedModel, name: str, tokens: int) -> list[int]:
    """Its first tokens.

    Raises:
        ConfigError: there is no such text.
        PromptError: it is too short, or cannot be read.
    """
    ids = encode(loaded, text_named(name))
    if len(ids) < tokens:
        raise PromptError(
            f"the text {name.partition('=')[0]} has {len(ids):,} tokens for {loaded.name}, and "
            f"{tokens:,} are asked for; ask for fewer --tokens, or give a longer text"
        )
    return ids[:tokens]
