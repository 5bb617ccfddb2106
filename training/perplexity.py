"""Perplexity of held-out text by position, and by how much text stands in front.

A window is `<bos>` and the next `window - 1` tokens of one document; windows do not overlap, and
documents too short for one are left out. All buckets are of the same windows. What stands at later
positions is other text all the same, so the same last tokens of every window are also guessed with
less and with more text in front: that difference is paired.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.evaluate.text_table import format_table
from training.data import BOS
from training.model import attention_backend

EDGES = (0, 512, 1024, 2048, 4096, 8192, 12_288, 16_384)
"""Of the buckets, in tokens."""
CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Tokens in front of a window's end, `<bos>` counted in; and all there are."""
TAIL = 512
"""Tokens at a window's end that are guessed with different contexts."""
_BATCH_TOKENS = 32_768
_LOGITS_TOKENS = 4096
_LN_2 = float(np.log(2))

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Windows:
    """Held-out text in equal pieces."""

    ids: NDArray[np.int32]
    """`<bos>` first. [windows, tokens]"""
    byte_counts: NDArray[np.int32] | None
    """Bytes of text behind each token; None: the vocabulary does not tell. [windows, tokens]"""
    documents: int
    """That they are from."""


def windows_of(
    texts: Sequence[str], encode: Callable[[str], Sequence[int]], window: int,
    token_bytes: NDArray[np.int32] | None,
) -> Windows:  # fmt: skip
    """Cut documents into windows.

    Args:
        texts: whole documents.
        encode: ids of a text, without special tokens.
        window: tokens of one, `<bos>` counted in.
        token_bytes: bytes of text of each token of the vocabulary. [vocabulary]
    """
    rows: list[list[int]] = []
    documents = 0
    for text in texts:
        ids = list(encode(text))
        whole = len(ids) // (window - 1)
        documents += whole > 0
        rows += [[BOS, *ids[at * (window - 1) : (at + 1) * (window - 1)]] for at in range(whole)]
    found = np.array(rows, dtype=np.int32).reshape(-1, window)
    return Windows(found, None if token_bytes is None else token_bytes[found], documents)


@torch.no_grad()
def losses(model: Any, ids: NDArray[np.int32], last: int) -> Floats:
    """Cross entropy of the last tokens of some rows, in nats. [rows, last]

    Args:
        model: a causal language model of transformers.
        ids: [rows, tokens]
        last: how many tokens of each row are guessed, fewer than it has.
    """
    device = model.get_input_embeddings().weight.device
    put = torch.from_numpy(ids).to(device)
    with attention_backend("flash" if put.is_cuda else "auto"):
        hidden = model.base_model(input_ids=put, use_cache=False).last_hidden_state
    seen = hidden[:, -last - 1 : -1].flatten(0, 1)
    targets = put[:, -last:].flatten().long()
    parts = [
        functional.cross_entropy(model.get_output_embeddings()(h).float(), t, reduction="none")
        for h, t in zip(_slices(seen), _slices(targets), strict=True)
    ]
    told: Floats = torch.cat(parts).cpu().double().numpy().reshape(len(ids), last)
    return told


def measure(
    model: Any, windows: Windows, on_tokens: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Loss by position, and of the windows' ends by context.

    Args:
        model: a causal language model of transformers.
        windows: at least one.
        on_tokens: called with a number of tokens that were read.

    Returns:
        "buckets" and "contexts", lists of plain records. Errors are standard errors over windows,
        None with one window.
    """
    window = windows.ids.shape[1]
    whole = _all_losses(model, windows.ids, window - 1, on_tokens)
    edges = [edge for edge in EDGES if edge < window]
    buckets = [
        _bucket(whole, windows, first, last)
        for first, last in zip(edges, [*edges[1:], window], strict=True)
    ]
    buckets.append(_bucket(whole, windows, 0, window))
    contexts = []
    tail = min(TAIL, window // 2)
    full = whole[:, -tail:]
    for context in (n for n in CONTEXTS if n < window - tail):
        ids = windows.ids[:, -tail - context :].copy()
        ids[:, 0] = BOS
        seen = _all_losses(model, ids, tail, on_tokens)
        contexts.append(_context(context, seen, full))
    contexts.append(_context(window - tail, full, full))
    return {
        "window": window, "windows": len(windows.ids), "documents": windows.documents,
        "tail": tail, "buckets": buckets, "contexts": contexts,
    }  # fmt: skip


def tokens_to_read(windows: Windows) -> int:
    """Tokens that `measure` reads."""
    count, window = windows.ids.shape
    tail = min(TAIL, window // 2)
    return int(count * (window + sum(n + tail for n in CONTEXTS if n < window - tail)))


def tables(figures: dict[str, Any]) -> tuple[str, str]:
    """Loss by position, and of the windows' ends by context."""
    positions = [
        [
            "all" if each["to"] - each["from"] == figures["window"] else
            f"{each['from']:,} to {each['to']:,}",
            _with_error(each["nats"], each["error"]), f"{each['perplexity']:.2f}",
            "-" if each["bits_per_byte"] is None else f"{each['bits_per_byte']:.3f}",
        ]
        for each in figures["buckets"]
    ]  # fmt: skip
    contexts = [
        [
            f"{each['tokens']:,}", _with_error(each["nats"], each["error"]),
            f"{each['perplexity']:.2f}", _with_error(each["worse"], each["worse_error"]),
        ]
        for each in figures["contexts"]
    ]  # fmt: skip
    return (
        format_table(["position", "nats a token", "perplexity", "bits a byte"], positions),
        format_table(["tokens in front", "nats a token", "perplexity", "than with all"], contexts),
    )


def byte_lengths(vocabulary: dict[str, int]) -> NDArray[np.int32] | None:
    """Bytes of text of each token of a byte-level vocabulary, in which every character stands for
    one byte; None for another kind. [vocabulary]"""
    counts = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    alphabet = byte_alphabet()
    for token, number in vocabulary.items():
        counts[number] = len(token)
    return counts if alphabet <= set(vocabulary) else None


def byte_alphabet() -> set[str]:
    """The 256 characters that stand for bytes in byte-level tokenizers."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {chr(one) for one in shown} | {chr(0x100 + at) for at in range(256 - len(shown))}


def _slices(tokens: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tokens, _LOGITS_TOKENS)


def _all_losses(
    model: Any, ids: NDArray[np.int32], last: int, on_tokens: Callable[[int], None]
) -> Floats:
    parts = []
    for rows in _batches(ids):
        parts.append(losses(model, rows, last))
        on_tokens(rows.size)
    return np.concatenate(parts)


def _batches(ids: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    rows = max(1, _BATCH_TOKENS // ids.shape[1])
    for first in range(0, len(ids), rows):
        yield ids[first : first + rows]


def _bucket(whole: Floats, windows: Windows, first: int, last: int) -> dict[str, Any]:
    """Of the tokens at positions `first` to `last - 1`; `<bos>`, at 0, is not guessed."""
    start = max(first, 1)
    found = whole[:, start - 1 : last - 1]
    nats = float(found.mean())
    counts = windows.byte_counts
    bits = None
    if counts is not None:
        bits = float(found.sum() / _LN_2 / counts[:, start:last].sum())
    return {
        "from": first, "to": last, "tokens": int(found.size), "nats": nats,
        "error": _error(found.mean(axis=1)), "perplexity": float(np.exp(nats)),
        "bits_per_byte": bits,
    }  # fmt: skip


def _context(tokens: int, seen: Floats, full: Floats) -> dict[str, Any]:
    nats, worse = seen.mean(axis=1), (seen - full).mean(axis=1)
    return {
        "tokens": tokens, "nats": float(nats.mean()), "error": _error(nats),
        "perplexity": float(np.exp(nats.mean())), "worse": float(worse.mean()),
        "worse_error": _error(worse),
    }  # fmt: skip


def _error(values: Floats) -> float | None:
    """Standard error of a mean over windows."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} +- {error:.4f}"
