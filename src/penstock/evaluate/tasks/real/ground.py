"""Ground: what things are hidden in, a book or source code, and how they are told there."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.evaluate.tasks.english.filler import Filler, Haystack
from penstock.evaluate.tasks.english.haystack import TextHaystack
from penstock.evaluate.tasks.english.needles import insert_at
from penstock.evaluate.tasks.real.texts import ShippedTexts

PARTS = 16
"""A haystack's last unit may be cut after so many parts, for prompts of equal length."""


@dataclass(frozen=True, slots=True)
class Ground:
    """One kind of long text.

    Attributes:
        name: "prose" or "code".
        noun: what a question calls it.
        haystack: makes it, unit by unit.
    """

    name: str
    noun: str
    haystack: Haystack

    @property
    def is_code(self) -> bool:
        """Whether things are told as lines of code."""
        return self.name == "code"

    def told(self, prose: str, code: str) -> str:
        """A thing in this ground's form: a sentence, or a line of its own."""
        return f"\n{code}" if self.is_code else prose

    def hiding(
        self, facts: Sequence[str], rng: random.Random, *, in_order: bool = False
    ) -> Callable[[int], Sequence[str]]:
        """Facts at random places of a haystack: `Draft.pieces`, in parts of a unit (`PARTS`).

        Args:
            in_order: they stand in their own order.
        """
        drawn = [rng.random() for _ in facts]
        places = sorted(drawn) if in_order else drawn
        filler = self.haystack(rng)

        def pieces(parts: int) -> Sequence[str]:
            whole, rest = divmod(parts, PARTS)
            *kept, last = filler.take(whole + 1)
            begun = last[: len(last) * rest // PARTS].rstrip()
            return insert_at(places, facts, [*kept, begun] if begun else kept)

        return pieces


class CodeHaystack:
    """Makes haystacks of source code: a random file from its beginning, then another, line by line.

    Args:
        files: each below a line with its path.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = [file.splitlines() for file in files]

    def __call__(self, rng: random.Random) -> Filler:
        """A haystack; its random numbers are split off, as those of `filler.prose`."""
        return Filler(self._lines(random.Random(rng.getrandbits(64))))

    def _lines(self, rng: random.Random) -> Iterator[str]:
        while True:
            first, *rest = rng.choice(self._files)
            yield f"\n\n{first}"
            for line in rest:
                yield f"\n{line}"


def grounds_of(texts: ShippedTexts) -> tuple[Ground, Ground]:
    """Prose and code; a task's samples take them in turn."""
    return (
        Ground("prose", "text", TextHaystack(texts.books)),
        Ground("code", "source code", CodeHaystack(texts.code)),
    )
