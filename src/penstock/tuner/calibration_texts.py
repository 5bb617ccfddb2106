"""Texts that a model is tuned on: files, or those that come with the bundled model."""

import lzma
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import penstock.models
from penstock.core.errors import ConfigError, PromptError
from penstock.engine.adapter import LowRankAdapter
from penstock.generation.prompts import encode, read_text_file
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import BUNDLED, LoadedModel

SHORTEST_PROMPT_TOKENS = 256
"""Least tokens in front of those that are forced: below, every policy keeps everything."""
_LIKE_THE_LONGEST = 0.9
_FOLDER = Path(penstock.models.__file__).parent / BUNDLED


def calibration_tokens(
    loaded: LoadedModel, files: Sequence[Path], *, tokens: int, forced: int
) -> list[Tensor]:
    """Pieces of text, whose last tokens are for a policy to be forced through.

    A file is cut into as many pieces of `tokens` tokens as it has; its rest is a piece if it is at
    least half as long, or all there is. Each piece starts as a prompt does (`<bos>`, where the
    tokenizer adds it). Without files, for the bundled model: those of the shipped documents
    (`benchmarks/write_recall_calibration.py`) that are about as long as the longest that fits; each
    ends in the answer to a question about it.

    Args:
        loaded: the model and its tokenizer.
        files: UTF-8 texts of the kind that will be read.
        tokens: longest piece, what is forced included.
        forced: tokens at the end of each piece, of which the caller wants to force a policy.

    Returns:
        int64, at most `tokens` each. [tokens]

    Raises:
        ConfigError: there is no text for this model, or no tokenizer to read it with; `tokens` has
            no room for a prompt before what is forced.
        PromptError: a file cannot be read or is no text, or no text is long enough.
    """
    least = SHORTEST_PROMPT_TOKENS + forced
    if tokens < least:
        raise ConfigError(
            f"pieces of {tokens:,} tokens are too short to tune on: with {forced} at the end that "
            f"are decoded they need at least {least:,}"
        )
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} came without a tokenizer, so that no text can be read")
    if files:
        return _pieces_of(loaded, files, tokens, least)
    if (
        fingerprint(loaded.model)
        != LowRankAdapter.load(_FOLDER / "adapter.safetensors").fingerprint
    ):
        raise ConfigError(
            f"no text to tune {loaded.name} on comes with this package; give --text FILE (UTF-8, "
            "of the kind that will be read)"
        )
    return _shipped(loaded, tokens, least)


def _pieces_of(loaded: LoadedModel, files: Sequence[Path], tokens: int, least: int) -> list[Tensor]:
    """Files cut into pieces; see `calibration_tokens`."""
    pieces, longest = list[Tensor](), 0
    for file in files:
        ids = encode(loaded, read_text_file(file, "calibration text"))
        longest = max(longest, len(ids))
        head = ids[:1] if ids and ids[0] == getattr(loaded.tokenizer, "bos_token_id", None) else []
        body = ids[len(head) :]
        step = tokens - len(head)
        for start in range(0, len(body), step):
            piece = head + body[start : start + step]
            if len(piece) >= (least if start == 0 else max(least, tokens // 2)):
                pieces.append(torch.tensor(piece))
    if not pieces:
        raise PromptError(
            f"the calibration text has {longest:,} tokens for {loaded.name}; tuning needs one of "
            f"at least {least:,}, and better of {tokens:,}"
        )
    return pieces


def _shipped(loaded: LoadedModel, tokens: int, least: int) -> list[Tensor]:
    """The bundled model's own documents; see `calibration_tokens`."""
    documents = lzma.decompress((_FOLDER / "calibration.txt.xz").read_bytes()).decode()
    texts = [torch.tensor(encode(loaded, text)) for text in documents.split("\n\n")]
    fitting = [text for text in texts if least <= len(text) <= tokens]
    if not fitting:
        shortest = max(least, min(len(text) for text in texts))
        raise PromptError(
            f"the texts that come with {loaded.name} have at least {shortest:,} tokens; tune for a "
            f"context of at least so many instead of {tokens:,}, or give --text FILE"
        )
    longest = max(len(text) for text in fitting)
    return [text for text in fitting if len(text) >= _LIKE_THE_LONGEST * longest]
