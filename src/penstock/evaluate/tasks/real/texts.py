"""The texts that ship with the suite: two books, and source code frozen at one commit.

Where they come from, and their licences: `texts/README.md`.
"""

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "texts"
HEAD = "# file: "
"""Before a file's path, in the line above its text."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of source code: its path in the repository, and its text."""

    path: str
    text: str

    @property
    def shown(self) -> str:
        """The text below a line with the path, as prompts have it."""
        return f"{HEAD}{self.path}\n{self.text}"


@dataclass(frozen=True, slots=True)
class ShippedTexts:
    """What samples are made of.

    Attributes:
        books: whole books, paragraphs separated by blank lines.
        files: of one repository.
        digest: tells other texts apart.
    """

    books: tuple[str, ...]
    files: tuple[SourceFile, ...]
    digest: str

    @property
    def code(self) -> tuple[str, ...]:
        """The files below their paths."""
        return tuple(file.shown for file in self.files)


def read_shipped_texts() -> ShippedTexts:
    """Unpack the texts (2.7 MB)."""
    prose, code = (
        lzma.decompress((_FOLDER / f"{name}.txt.xz").read_bytes()) for name in ("prose", "code")
    )
    files = []
    for shown in code.decode().strip().split("\f"):
        head, _, text = shown.partition("\n")
        files.append(SourceFile(head.removeprefix(HEAD), text))
    return ShippedTexts(
        books=tuple(prose.decode().strip().split("\f")), files=tuple(files),
        digest=hashlib.sha256(prose + code).hexdigest()[:16],
    )  # fmt: skip
