"""The corpus of a prose run: documents from files, a tokenizer trained on them, their tokens.

`prepare` leaves a folder with `tokenizer.json`, `tokenizer_config.json` and flat arrays that the
processes that make rows map into memory. The same files and settings give the same folder, and a
folder that is there already is used again.
"""

import hashlib
import json
import lzma
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.haystack import split_sentences
from training.prose_settings import CorpusPlan

FILES = ("books.jsonl.xz", "docs.jsonl.xz")
"""What is trained on, in this order; `holdout.jsonl.xz` beside them is never opened here."""
SPECIAL = ("<pad>", "<bos>", "<eos>")
_BLOCK = 16_384
"""Characters: of each block of a text the tokenizer is trained on the beginning."""
_WRITTEN = "corpus.json"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of a file."""

    id: str
    source: str
    licence: str
    text: str
    title: str = ""
    author: str = ""


def read_documents(path: str | Path) -> Iterator[Document]:
    """The documents of a `.jsonl.xz` file, in its order.

    Raises:
        ConfigError: it cannot be read, or a line is no document.
    """
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                yield Document(**{k: record[k] for k in Document.__slots__ if k in record})
    except (OSError, EOFError, ValueError, TypeError, lzma.LZMAError) as error:
        raise ConfigError(f"cannot read documents from {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, behind one another, without special tokens."""

    folder: Path
    tokens: NDArray[np.uint16]
    """[tokens]"""
    documents: NDArray[np.int64]
    """Where each document starts, and the end of the last. [documents + 1]"""
    pieces: NDArray[np.int64]
    """Where each piece of `split_sentences` starts, and the end of the last. [pieces + 1]"""

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """Map a folder that `prepare` has left into memory."""
        return cls(folder, *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS))

    def tokenizer(self) -> Tokenizer:
        """Trained on it; puts `<bos>` in front where special tokens are asked for."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def text(self, tokenizer: Tokenizer, document: int) -> str:
        """Of one document."""
        start, end = (int(self.documents[document + more]) for more in (0, 1))
        text: str = tokenizer.decode(self.tokens[start:end].tolist(), skip_special_tokens=False)
        return text


_ARRAYS = ("tokens", "documents", "pieces")


def prepare(
    source: Path, folder: Path, plan: CorpusPlan, positions: int, say: Say, *, again: bool = False
) -> Corpus:
    """Make a corpus ready for training.

    Args:
        source: folder with `FILES`.
        folder: for the result.
        plan: of the tokenizer.
        positions: of the model, for the tokenizer's settings.
        say: told of what is being done.
        again: something goes on that was made of what is in `folder`.

    Raises:
        ConfigError: a file is missing or no corpus, the corpus is too small for the vocabulary,
            or `again` with another corpus.
    """
    missing = [name for name in FILES if not (source / name).is_file()]
    if missing:
        raise ConfigError(
            f"--corpus {source} lacks {missing[0]}; training/README.md says what it is"
        )
    made_from = {
        "files": {n: hashlib.sha256((source / n).read_bytes()).hexdigest() for n in FILES},
        "vocabulary": plan.vocabulary, "sample_mb": plan.sample_mb, "positions": positions,
    }  # fmt: skip
    written = folder / _WRITTEN
    if written.exists():
        if json.loads(written.read_text(encoding="utf-8"))["from"] == made_from:
            return Corpus.open(folder)
        if again:
            raise ConfigError(
                f"cannot go on: {folder} was made of another corpus than --corpus {source}; give "
                "the same one, or another --out"
            )
    folder.mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)
    cores = _cores()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(len(FILES), cores)) as pool:
        texts = [t for some in pool.map(_texts, [source / n for n in FILES], 1) for t in some]
    size = sum(map(len, texts))
    say(f"{len(texts):,} documents, {size / 1e6:.1f} M characters; training the tokenizer")
    tokenizer = train_tokenizer(texts, plan)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, positions)
    say(f"tokenising with {cores} processes")
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))  # the longest first
    with context.Pool(cores, _begin, (tokenizer.to_str(),)) as pool:
        done = pool.imap(_encode, (texts[at] for at in order), chunksize=1)
        encoded = dict(zip(order, done, strict=True))
    counts = [np.frombuffer(encoded[at][1], np.int32) for at in range(len(texts))]
    tokens = np.concatenate([np.frombuffer(encoded[at][0], np.uint16) for at in range(len(texts))])
    documents = np.cumsum([0, *(int(count.sum()) for count in counts)], dtype=np.int64)
    pieces = np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)
    assert documents[-1] == pieces[-1] == len(tokens)
    for name, array in zip(_ARRAYS, (tokens, documents, pieces), strict=True):
        np.save(folder / f"{name}.npy", array)
    content = {"from": made_from, "documents": len(texts), "characters": size,
               "tokens": len(tokens), "pieces": len(pieces) - 1}  # fmt: skip
    written.write_text(json.dumps(content, indent=1), encoding="utf-8")
    say(f"{len(tokens):,} tokens in {len(pieces) - 1:,} sentences")
    return Corpus.open(folder)


def train_tokenizer(texts: Sequence[str], plan: CorpusPlan) -> Tokenizer:
    """Byte-level BPE, digits one by one, from the beginnings of evenly spread blocks.

    Raises:
        ConfigError: the texts are too few for the vocabulary.
    """
    share = min(1.0, plan.sample_mb * 1e6 / max(1, sum(map(len, texts))))
    each = max(1, round(_BLOCK * share))
    sample = (t[at : at + each] for t in texts for at in range(0, len(t), _BLOCK))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocabulary, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() != plan.vocabulary:
        raise ConfigError(
            f"the corpus is too small for a vocabulary of {plan.vocabulary}: it gives "
            f"{tokenizer.get_vocab_size()}"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    return tokenizer


def with_separators(pieces: Sequence[str]) -> list[str]:
    """Pieces of `split_sentences` as they stand in the text: each with what is before it.

    A byte-level token never goes on over white space, so the tokens of the parts, put together,
    are those of the whole.
    """
    first, *rest = pieces or ("",)
    return [first, *(piece if piece.startswith("\n") else f" {piece}" for piece in rest)]


def _write_config(folder: Path, positions: int) -> None:
    content = {
        "backend": "tokenizers", "bos_token": "<bos>", "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>", "model_max_length": positions, "pad_token": "<pad>",
        "tokenizer_class": "TokenizersBackend",
    }  # fmt: skip
    text = json.dumps(content, indent=2)
    (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")


def _texts(path: Path) -> list[str]:
    return [document.text for document in read_documents(path)]


def _begin(tokenizer: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_str(tokenizer)
    _tokenizer.encode_special_tokens = True  # "<eos>" in a text is text


_tokenizer: Any = None


def _encode(text: str) -> tuple[bytes, bytes]:
    """Tokens (uint16) of a document, and how many each of its pieces has (int32)."""
    parts = with_separators(split_sentences(text))
    found = [e.ids for e in _tokenizer.encode_batch_fast(parts, add_special_tokens=False)]
    counts = np.array([len(ids) for ids in found], dtype=np.int32)
    tokens = np.fromiter((i for ids in found for i in ids), np.uint16, int(counts.sum()))
    return tokens.tobytes(), counts.tobytes()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 2
