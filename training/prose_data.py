"""Rows of a prose run: chunks of documents, and questions inside real text.

What a row holds follows from the run's seed, the micro-batch's number and the row's number in it,
and from nothing else. Tokens of the corpus are spliced with those of facts and questions where
white space begins: so the row's tokens are those of its whole text (a byte-level token never goes
on over white space), and a question looks as it does in `penstock.evaluate.tasks`.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import Filler
from penstock.evaluate.tasks.english.prompt_fit import Prompter, fit
from training.corpus import Corpus
from training.data import BOS, EOS, OTHER, PAD, Batch, positions_of
from training.prose_settings import PROSE, ProseSettings
from training.prose_tasks import KNOWN, MANY_KEYS, QUOTE, Task, TokenPiece, draw_task

PADDING, PLAIN, DOCUMENT, BETWEEN, ANSWER = range(5)
"""What a token is: padding, plain prose, real prose that is asked about, a fact or a question, an
answer."""
_TRIES = 12
_DENSE_SHARE = (0.2, 0.6)
"""Of a row that is kept for questions where a document is there to be asked much about."""
_FEWEST_ANSWERS = 96
"""Tokens that a row keeps for quotes at least."""
Ids = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class ProseRow:
    """One row of a batch."""

    tokens: NDArray[np.int32]
    """[length]"""
    positions: NDArray[np.int32]
    """[length]"""
    kinds: NDArray[np.uint8]
    """[length]"""
    group: str


class RowTokenizer:
    """The run's tokenizer as the bench's tasks and the row maker use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        """Token ids."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_all(self, texts: list[str]) -> list[Ids]:
        """Token ids of several texts, without special tokens."""
        found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint16) for one in found]


class ProseRowMaker:
    """Makes rows for one run.

    Args:
        settings: of the run.
        folder: of its prepared corpus.

    Raises:
        ConfigError: the mix names a task that does not exist, no document is left, or a stage's
            shortest rows are too short for all tasks.
    """

    def __init__(self, settings: ProseSettings, folder: Path) -> None:
        for task in settings.mix:
            if task not in KNOWN:
                raise ConfigError(f"no task is called {task!r}; there are {', '.join(KNOWN)}")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._settings = settings
        self._corpus = corpus = Corpus.open(folder)
        self._inner = corpus.tokenizer()
        self._tokenizer = RowTokenizer(self._inner)
        self._prompter = Prompter(self._tokenizer)
        self._tasks, self._shares = list(settings.mix), list(settings.mix.values())
        kept = len(corpus.documents) - 1 - settings.corpus.held_back
        if kept < 1:
            raise ConfigError("corpus.held_back leaves no document to train on")
        self._documents = np.array(corpus.documents[: kept + 1])
        pieces = np.array(corpus.pieces)
        self._pieces = pieces[: int(np.searchsorted(pieces, self._documents[-1], "right"))]
        (newline,) = self._inner.encode("\n", add_special_tokens=False).ids
        starts = self._pieces[:-1]
        starts = starts[starts + 2 < self._documents[-1]]
        tokens = corpus.tokens
        self._paragraphs = starts[(tokens[starts] == newline) & (tokens[starts + 1] == newline)]
        if not len(self._paragraphs):
            raise ConfigError("the corpus has no document of several paragraphs")
        self._starts = np.union1d(self._documents[:-1], self._paragraphs)
        for stage in settings.stages:
            if stage.recall:
                self.asking_row(min(stage.lengths), "check")

    def batch(self, number: int) -> Batch:
        """Micro-batch `number` of the run, from 0."""
        settings = self._settings
        stage = settings.stage_at(number // settings.micro_batches)
        name = f"train/{settings.seed}/{number}"
        rng = random.Random(name)
        length = rng.choice(stage.lengths)
        count = settings.micro_batch_tokens // length
        recall = settings.recall_at(number // settings.micro_batches)
        asking = int(recall * count + rng.random())
        rows = []
        for index in range(count):
            try:
                make = self.asking_row if index < asking else self.plain_row
                rows.append(make(length, f"{name}/{index}"))
            except ConfigError:  # nothing that was drawn fits: a run does not end for that
                rows.append(self.plain_row(length, f"{name}/{index}"))
        return self._join(rows)

    def plain_row(self, length: int, name: str) -> ProseRow:
        """A chunk of one document, or short documents with `<eos>` between them."""
        rng = random.Random(name)
        tokens = np.full(length, PAD, dtype=np.int32)
        tokens[0] = BOS
        self._fill(tokens, 1, rng)
        kinds = np.full(length, PLAIN, dtype=np.uint8)
        return ProseRow(tokens, np.arange(length, dtype=np.int32), kinds, PROSE)

    def asking_row(self, length: int, name: str) -> ProseRow:
        """A document with questions, of a task drawn from the mix; plain prose fills it up.

        Raises:
            ConfigError: none of the mix's tasks fits into so few tokens.
        """
        rng = random.Random(name)
        error: ConfigError | None = None
        for _ in range(_TRIES):
            task = rng.choices(self._tasks, self._shares)[0]
            try:
                return self._row_of(task, length, rng)
            except ConfigError as refusal:  # too short for this task: another one
                error = refusal
        raise ConfigError(f"rows of {length} tokens are too short: {error}")

    def _row_of(self, name: str, length: int, rng: random.Random) -> ProseRow:
        plan = self._settings.rows
        task = draw_task(
            name, length, rng, self._prompter, self._haystack, plan.other_wordings, self._text
        )
        parts = _Parts(task, self._corpus.tokens, self._tokenizer)
        draft = task.draft
        tail = self._encode(f"\n{draft.question}\n{draft.lead}") if draft.lead else None
        said = self._encode(draft.answer) if draft.answer else None
        fixed = 1 + sum(len(ids) + 1 for ids in (tail, said) if ids is not None)
        low, high = _DENSE_SHARE if name in (MANY_KEYS, QUOTE) else (0.0, plan.further_share)
        spare = int(length * rng.uniform(low, high)) if task.further else 0
        if tail is None:
            spare = min(length * 2 // 3, max(spare, _FEWEST_ANSWERS))
        room = length - fixed - spare
        units = fit(room, parts.size, least=draft.least_units)
        pieces = draft.pieces(units)
        found = [(np.array([BOS], np.uint16), BETWEEN), *parts.document(pieces)]
        end = sum(len(ids) for ids, _ in found)
        if tail is not None:
            said = self._encode(task.answer(pieces)) if task.answer else said
            assert said is not None
            found += [(tail, BETWEEN), (np.append(said, np.uint16(EOS)), ANSWER)]
        used = sum(len(ids) for ids, _ in found)
        for question, answer in task.further(pieces, rng) if task.further else ():
            text = question if tail is not None or used > end else f"\n{question}"
            asked, told = self._tokenizer.encode_all([text, answer])
            used += len(asked) + len(told) + 1
            if used > length:
                break
            found += [(asked, BETWEEN), (np.append(told, np.uint16(EOS)), ANSWER)]
        if sum(len(ids) for ids, _ in found) > length:
            raise ConfigError(f"{name} does not fit into {length} tokens")
        if not any(kind == ANSWER for _, kind in found):
            raise ConfigError(f"nothing in {length} tokens can be asked for {name}")
        return self._finished(name, found, end, length, rng)

    def _finished(
        self, name: str, found: list[tuple[Ids, int]], document: int, length: int,
        rng: random.Random,
    ) -> ProseRow:  # fmt: skip
        ids = np.concatenate([part for part, _ in found])
        tokens = np.full(length, PAD, dtype=np.int32)
        tokens[: len(ids)] = ids
        kinds = np.full(length, PLAIN, dtype=np.uint8)
        kinds[: len(ids)] = np.repeat(
            np.array([kind for _, kind in found], np.uint8), [len(part) for part, _ in found]
        )
        self._fill(tokens, len(ids), rng)
        draw = np.random.default_rng(rng.getrandbits(64))
        settings = self._settings
        positions = positions_of(length, document, settings.rows, settings.model.positions, draw)
        return ProseRow(tokens, positions, kinds, name)

    def _fill(self, tokens: NDArray[np.int32], at: int, rng: random.Random) -> None:
        """Fill a row from a place on, with a document that is long enough or with several."""
        length = len(tokens)
        while at < length:
            place = rng.randrange(int(self._documents[-1]))
            document = int(np.searchsorted(self._documents, place, "right")) - 1
            begin, end = int(self._documents[document]), int(self._documents[document + 1])
            if end - begin >= length - at:
                place = min(place, end - (length - at))
            starts = self._starts
            start = int(starts[np.searchsorted(starts, place, "right") - 1])
            start += 2 if start > begin else 0  # a paragraph's two line breaks
            taken = min(end - start, length - at)
            tokens[at : at + taken] = self._corpus.tokens[start : start + taken]
            at += taken
            if at < length:
                tokens[at] = EOS
                at += 1

    def _haystack(self, rng: random.Random) -> Filler:
        """As `TextHaystack`, of pieces that are tokens already."""
        return Filler(self._token_pieces(random.Random(rng.getrandbits(64))))

    def _token_pieces(self, rng: random.Random) -> Iterator[str]:
        while True:
            place = rng.randrange(int(self._paragraphs[0]), int(self._documents[-1]))
            start = self._paragraphs[np.searchsorted(self._paragraphs, place, "right") - 1]
            document = np.searchsorted(self._documents, start, "right")
            first, last = np.searchsorted(self._pieces, [start, self._documents[document]])
            for at in range(first, last):
                yield TokenPiece.of(int(self._pieces[at]), int(self._pieces[at + 1]))

    def _text(self, piece: TokenPiece) -> str:
        ids = self._corpus.tokens[piece.start : piece.start + len(piece)].tolist()
        text: str = self._inner.decode(ids, skip_special_tokens=False)
        return text

    def _encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.uint16)

    def _join(self, rows: list[ProseRow]) -> Batch:
        """Every token is guessed, so that all batches have one shape; weights choose."""
        tokens = np.stack([row.tokens for row in rows]).astype(np.uint16)
        kinds = np.stack([row.kinds for row in rows])
        weights = weigh(kinds, self._settings)
        numbers = np.array([self._settings.groups.index(row.group) for row in rows])
        counted = (kinds == PLAIN) & (numbers == 0)[:, None] | (kinds == ANSWER)
        groups = np.where(counted, numbers[:, None], OTHER)
        weights[:, 0] = 0.0  # nothing stands before a row's first token
        return Batch(
            tokens=tokens,
            positions=np.stack([row.positions for row in rows]),
            places=np.arange(tokens.size, dtype=np.int32),
            targets=np.roll(tokens.reshape(-1), -1),
            weights=np.roll(weights.reshape(-1), -1).astype(np.float32),
            groups=np.roll(np.where(weights > 0, groups, OTHER).reshape(-1), -1).astype(np.int8),
        )


class _Parts:
    """A draft's document in tokens; what was encoded once is kept."""

    def __init__(self, task: Task, corpus: Ids, tokenizer: RowTokenizer) -> None:
        self._draft, self._corpus, self._tokenizer = task.draft, corpus, tokenizer
        self._known: dict[str, Ids] = {}

    def size(self, units: int) -> int:
        """Tokens of preface and document with so many filler units."""
        pieces = self._draft.pieces(units)
        texts = self._texts(pieces)
        return sum(len(p) for p in pieces if isinstance(p, TokenPiece)) + sum(
            len(self._known[text]) for text in texts
        )

    def document(self, pieces: Sequence[str]) -> list[tuple[Ids, int]]:
        """Tokens and kinds of preface and document."""
        texts = iter(self._texts(pieces))
        found = []
        if not pieces or isinstance(pieces[0], TokenPiece):
            found.append((self._known[next(texts)], BETWEEN))
        for piece in pieces:
            if isinstance(piece, TokenPiece):
                ids = self._corpus[piece.start : piece.start + len(piece)]
                found.append((ids, DOCUMENT))
            else:
                found.append((self._known[next(texts)], BETWEEN))
        return found

    def _texts(self, pieces: Sequence[str]) -> list[str]:
        """What is to be encoded, in order: each text with what stands before it."""
        draft = self._draft
        if not pieces or isinstance(pieces[0], TokenPiece):  # it has its two line breaks itself
            texts = [draft.preface.removesuffix("\n")]
            rest = pieces
        else:
            texts = [f"{draft.preface}\n{pieces[0]}"]
            rest = pieces[1:]
        texts += [f"{draft.separator}{p}" for p in rest if not isinstance(p, TokenPiece)]
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._tokenizer.encode_all(new), strict=True))
        return texts


def weigh(kinds: NDArray[np.uint8], settings: ProseSettings) -> NDArray[np.float64]:
    """Weights of a micro-batch's tokens: answers have their share of the whole, as far as
    `answer_most` allows it, divided evenly among the rows that have some. [rows, length]"""
    plan = settings.rows
    of_kind = np.zeros(5)
    of_kind[[PLAIN, DOCUMENT, BETWEEN]] = 1.0, plan.document_weight, plan.other_weight
    weights: NDArray[np.float64] = of_kind[kinds]
    said = (kinds == ANSWER).sum(axis=1)
    wanted = weights.sum() * plan.answer_share / (1 - plan.answer_share)
    left, most = wanted, said * plan.answer_most
    each = np.zeros(len(kinds))
    order = [row for row in np.argsort(most, kind="stable") if said[row]]
    for done, row in enumerate(order):  # rows with few answers give up what they cannot have
        given = min(most[row], left / (len(order) - done))
        each[row] = given / said[row]
        left -= given
    return np.where(kinds == ANSWER, each[:, None], weights)
