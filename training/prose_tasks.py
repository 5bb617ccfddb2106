"""What is asked about real prose in training: the bench's English tasks, more wordings, quotes.

Everything is a draft of the bench whose document is pieces of text, or pieces of the corpus that
are tokens already (`TokenPiece`).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import Haystack
from penstock.evaluate.tasks.english.lexicon import ADJECTIVES, NOUNS, different, random_uuid
from penstock.evaluate.tasks.english.needles import (
    BENCH_WORDING,
    NEEDLE_KINDS,
    NeedleDraft,
    NeedleKind,
    Wording,
    draft_of,
)
from penstock.evaluate.tasks.english.prompt_fit import Draft, Prompter
from penstock.evaluate.tasks.english.registry import ENGLISH_TASKS

MANY_KEYS = "many_keys"
"""Training only: real prose with many facts, and as many questions as fit."""
QUOTE = "quote"
"""Training only: how a sentence of the real prose goes on."""
KNOWN = (*ENGLISH_TASKS, MANY_KEYS, QUOTE)

WORDINGS = (
    Wording(
        number="secret number", code="secret code",
        preface="Somewhere in this text there are {noun}s. Remember them.\n",
        fact="The {noun} of {key} is {value}.",
        ask_one="\nQuestion: Which {noun} does {names} have?",
        ask_many="\nQuestion: Which {noun}s does the text give for {names}?",
        lead_one="Answer: The {noun} of {names} is",
        lead_many="Answer: The {noun}s of {names} are",
    ),
    Wording(
        number="phone number", code="access key",
        preface="Read the following document. Questions about it follow.\n",
        fact="Note that the {noun} for {key} is {value}.",
        ask_one="\nWhat is the {noun} for {names}?",
        ask_many="\nWhat are the {noun}s for {names}?",
        lead_one="The {noun} for {names} is",
        lead_many="The {noun}s for {names} are",
    ),
    Wording(
        number="badge number", code="licence key",
        preface="Document:\n",
        fact="({key} was given the {noun} {value}.)",
        ask_one="\nQ: According to the document, what {noun} was given to {names}?",
        ask_many="\nQ: According to the document, what {noun}s were given to {names}?",
        lead_one="A:",
        lead_many="A:",
    ),
    Wording(
        number="locker number", code="serial code",
        preface="Please study this passage.\n",
        fact="Remember: {value} is the {noun} that belongs to {key}.",
        ask_one="\nQuestion: Tell me the {noun} that belongs to {names}.",
        ask_many="\nQuestion: Tell me all {noun}s that belong to {names}.",
        lead_one="Answer: {names}:",
        lead_many="Answer: {names}:",
    ),
)  # fmt: skip
"""Besides the bench's own, so that what is learnt is not one phrase."""

_ANSWERS_ARE_LONG = {"pointer_chasing": 1024, "state_tracking": 1024, "common_words": 1024}
_TOKENS_PER_FACT = (48, 400)
_QUOTE_WORDS = 5
_QUOTED_WORDS = 10


class TokenPiece(str):
    """A piece of the corpus: stands for its text in a draft, as long as it has tokens."""

    start: int
    """In the corpus's tokens."""

    @classmethod
    def of(cls, start: int, end: int) -> "TokenPiece":
        """Tokens `start` to `end - 1` of the corpus."""
        piece = cls("x" * (end - start))
        piece.start = start
        return piece


Ask = Callable[[Sequence[str], random.Random], Iterator[tuple[str, str]]]
"""Takes the document's pieces; gives further questions (from their line break on, with what the
answer starts with) and answers."""


@dataclass(frozen=True, slots=True)
class Task:
    """A draft of one row, and how more is asked about its document."""

    draft: Draft
    further: Ask | None = None
    answer: Callable[[Sequence[str]], str] | None = None
    """The draft's answer in the order of its document, where that is another."""


def draw_task(
    name: str, length: int, rng: random.Random, prompter: Prompter, haystack: Haystack,
    other_wordings: float, decode: Callable[[TokenPiece], str],
) -> Task:  # fmt: skip
    """Draw a task for a row of `length` tokens.

    Raises:
        ConfigError: it cannot be that short.
    """
    if length < _ANSWERS_ARE_LONG.get(name, 0):
        raise ConfigError(f"{length} tokens are too short for {name}")
    if name == QUOTE:
        return _quote(rng, haystack, decode)
    if name not in NEEDLE_KINDS and name != MANY_KEYS:
        return Task(ENGLISH_TASKS[name](rng, length, prompter, haystack))
    if name == MANY_KEYS:
        most = max(2, length // _TOKENS_PER_FACT[0] // 2)
        kind = NeedleKind(haystack="prose", keys=rng.randint(2, most))
        if length > 1024:  # few to many, the logarithm drawn evenly
            kind = NeedleKind(haystack="prose", keys=max(2, round(most ** rng.random())))
    else:
        kind = NEEDLE_KINDS[name]
    wording = rng.choice(WORDINGS) if rng.random() < other_wordings else BENCH_WORDING
    draw = partial(random_uuid, rng) if kind.uuid_keys else partial(_key, rng)
    needles = draft_of(name, kind, different(draw), rng, haystack=haystack, wording=wording)
    answer = partial(_in_order, needles) if kind.values > 1 else None
    several = kind.keys > kind.asked or kind.haystack == "needles"
    return Task(needles.draft, partial(_others, needles, wording) if several else None, answer)


def _key(rng: random.Random) -> str:
    """As the bench's keys, without shuffling all there are."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _in_order(needles: NeedleDraft, pieces: Sequence[str]) -> str:
    """All values of the one key that is asked for, as the document tells them."""
    facts = (needles.told[piece] for piece in pieces if piece in needles.told)
    return f" {', '.join(value for key, value in facts if key in needles.asked)}."


def _others(
    needles: NeedleDraft, wording: Wording, pieces: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, str]]:
    """Questions for the other keys of the document, one at a time."""
    facts = [needles.told[piece] for piece in pieces if piece in needles.told]
    rng.shuffle(facts)
    for key, value in facts:
        if key not in needles.asked:
            question = wording.question(needles.noun, [key], many=False)
            lead = wording.lead(needles.noun, [key], many=False)
            yield f"{question}\n{lead}", f" {value}."


def _quote(rng: random.Random, haystack: Haystack, decode: Callable[[TokenPiece], str]) -> Task:
    filler = haystack(rng)
    draft = Draft(
        task=QUOTE,
        preface="Read the text below closely; at its end you will be asked how sentences of it "
        "go on.\n",
        pieces=filler.take,
        least_units=2,
        question="", lead="", answer="", values=(), new_tokens=0,
    )  # fmt: skip

    def ask(pieces: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
        for piece in rng.sample(pieces, len(pieces)):
            assert isinstance(piece, TokenPiece)
            words = decode(piece).strip().split(" ")
            whole = len(words) > _QUOTE_WORDS + 1 and all(words) and "\n" not in "".join(words)
            if whole and '"' not in "".join(words[:_QUOTE_WORDS]):
                begin, rest = words[:_QUOTE_WORDS], words[_QUOTE_WORDS:][:_QUOTED_WORDS]
                named = " ".join(begin)
                question = f'\nQuestion: How does the sentence that begins with "{named}" go on?'
                yield f"{question}\nAnswer: {named}", f" {' '.join(rest)}"

    return Task(draft, ask)
