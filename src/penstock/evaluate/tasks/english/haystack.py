"""Real text as a haystack: split into sentences that join to the text again."""

import random
import re
from collections.abc import Iterator, Sequence

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import Filler

_ABBREVIATIONS = (
    "Mr|Mrs|Ms|Dr|St|Messrs|Mme|Mlle|Prof|Rev|Hon|Capt|Col|Gen|Lieut|Lt|Sgt|No|Vol|vs|cf"
)
_BREAK = re.compile(
    r"(?<=[.!?])(?= [\"'(\[]*[A-Z])"  # "It is. And"
    r"|(?<=[.!?][\"')\]])(?= [\"'(\[]*[A-Z])"  # '"It is." And'
    r"|(?<=[^\s])(?=\n)"  # every new line begins a piece
)
_NO_BREAK = re.compile(rf"(?:^|[\s\"'(\[])(?:{_ABBREVIATIONS}|[A-Z])\.$|^\s*\d{{1,3}}\.$")
_LONGEST_ABBREVIATION = 10


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, headings and lines of verse.

    Simple rules: a sentence ends with a full stop, question mark or exclamation mark, maybe a
    quotation mark or bracket, a single space and a capital letter behind it; common titles,
    initials and a line's number are no end. A new line always begins a piece.

    Returns:
        Pieces without a space around them, in order; one that begins a line keeps its line breaks
        in front. `filler.joined(pieces, " ")` is the text again (without white space around it).
    """
    text = text.strip()
    starts = [0]
    for found in _BREAK.finditer(text):
        at = found.start()
        before = text[max(starts[-1], at - _LONGEST_ABBREVIATION) : at]
        if text[at] == "\n" or not _NO_BREAK.search(before):
            starts.append(at)
    ends = [*starts[1:], len(text)]
    pieces = (text[start:end] for start, end in zip(starts, ends, strict=True))
    return [piece.removeprefix(" ") for piece in pieces]


class TextHaystack:
    """Makes haystacks that begin with a random paragraph and go on as the text does.

    At a text's end they go on with another random paragraph.

    Args:
        texts: whole documents, paragraphs separated by blank lines.

    Raises:
        ConfigError: there is no paragraph in them.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._documents = [split_sentences(text) for text in texts if text.strip()]
        self._starts = [
            (document, number)
            for document, pieces in enumerate(self._documents)
            for number, piece in enumerate(pieces)
            if number == 0 or piece.startswith("\n\n")
        ]
        if not self._starts:
            raise ConfigError("the text for the haystack is empty")

    def __call__(self, rng: random.Random) -> Filler:
        """A haystack; its random numbers are split off, as those of `filler.prose`."""
        return Filler(self._pieces(random.Random(rng.getrandbits(64))))

    def _pieces(self, rng: random.Random) -> Iterator[str]:
        while True:
            document, number = rng.choice(self._starts)
            pieces = self._documents[document][number:]
            yield "\n\n" + pieces[0].lstrip("\n")
            yield from pieces[1:]
