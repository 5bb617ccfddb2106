"""Recovery: ranges of a stored text whose KV is damaged are prefilled again from its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import DocumentDamagedError
from penstock.documents.contents import (
    GROUPS,
    TOKENS,
    WINDOWS,
    groups_blob,
    index_blobs,
    windows_blob,
)
from penstock.documents.opened import OpenDocument
from penstock.documents.stored_states import restore_states, states_blob, states_name
from penstock.documents.stored_visuals import VISUALS, hold_positions, require_text
from penstock.documents.storing import OnBytes, store_groups
from penstock.methods import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument, position_argument
from penstock.storage.documents import Damage, DocumentWriter

OnTokens = Callable[[int, int], None]
"""Called with the tokens prefilled so far and all of them."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What came back as it was stored, and what was prefilled again."""

    restored_tokens: int
    recomputed_tokens: int
    remade_index: bool = False
    """Whether the index of some layer was made from the keys again."""

    def __str__(self) -> str:
        total = self.restored_tokens + self.recomputed_tokens
        said = f"restored {self.restored_tokens:,} of {total:,} tokens"
        said += f", recomputed {self.recomputed_tokens:,}"
        return f"{said}, and the index" if self.remade_index else said


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Damaged groups as ranges [first, end), ascending, apart."""

    groups: list[tuple[int, int]]
    group_tokens: int
    length: int
    """Tokens of the text."""
    begin: int = 0
    """Tokens in front of which nothing is prefilled: recurrent states are stored there."""

    @classmethod
    def find(
        cls, damage: Damage, units: NDArray[np.int64], *, group_tokens: int, length: int,
        has_windows: bool, states: Sequence[int] | None = None,
    ) -> "Ranges":  # fmt: skip
        """Which groups must be prefilled again.

        Layers with a sliding window are stored at the text's end alone, so that with them
        everything in front of the last damaged group is prefilled too. With recurrent layers
        everything is from the last stored state in front of the damage on.

        Args:
            units: of the groups; negative where it is unknown.
            states: tokens behind which recurrent states are stored; None: there are no such layers.

        Raises:
            DocumentDamagedError: the tokens themselves are damaged.
        """
        known = [name for name in (TOKENS, VISUALS) if name in damage.blobs]
        if known or damage.seals:
            what = known[0] if known else "seals"
            raise DocumentDamagedError(
                f"the document's {what} are damaged, so that nothing can be prefilled again; add "
                "the text anew",
                what=what,
            )
        lost = [np.array(each, dtype=np.int64) for each in damage.units.values()]
        wrong = np.isin(units, np.concatenate([*lost, np.empty(0, dtype=np.int64)])) | (units < 0)
        sound = {0, *(n for n in states or () if states_name(n) not in damage.blobs)}
        lost_state = states is not None and length not in sound
        if WINDOWS in damage.blobs:
            wrong[-1] = True
        begin = 0
        if states is not None and not has_windows and (wrong.any() or lost_state):
            first = int(wrong.argmax()) * group_tokens if wrong.any() else length
            begin = max(n for n in sound if n <= first)
            wrong[-1] |= lost_state
        if (has_windows or states is not None) and wrong.any():
            wrong[begin // group_tokens : np.nonzero(wrong)[0][-1]] = True
        edges = np.diff(wrong.astype(np.int8), prepend=0, append=0)
        starts, ends = np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0]
        return cls(
            groups=list(zip(starts.tolist(), ends.tolist(), strict=True)),
            group_tokens=group_tokens, length=length, begin=begin,
        )  # fmt: skip

    def tokens(self, first: int, end: int) -> tuple[int, int]:
        """First and end token of a range of groups."""
        start = max(first * self.group_tokens, self.begin)
        return start, min(end * self.group_tokens, self.length)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranges."""
        spans = (self.tokens(*each) for each in self.groups)
        return sum(end - start for start, end in spans)


def mend(
    opened: OpenDocument, damage: Damage, ranges: Ranges, on_tokens: OnTokens, on_bytes: OnBytes
) -> int:
    """Commit a generation without the damage; an index that was lost comes with `remake_index`.

    Returns:
        Bytes written.

    Raises:
        DocumentBusyError: another process writes to the document, or has since it was opened.
        StorageError: the disk failed, or is full; the document stays as it was.
    """
    stored, settings = opened.stored, opened.settings
    with DocumentWriter.extend(
        opened.folder, key=settings.key, generation=stored.generation, repair=True
    ) as writer:
        groups, fresh = opened.groups, dict[str, bytes]()
        if ranges.groups:
            spans = [ranges.tokens(*each) for each in ranges.groups]
            require_text(spans, opened.pictures.visuals)
            with _exact_cache(opened, ranges) as cache:
                restore_states(stored, cache, cache.get_seq_length())
                _recompute(opened, cache, ranges, on_tokens)
                groups = _store_ranges(cache, writer, groups, ranges, on_bytes)
                if cache.get_seq_length() == ranges.length:
                    fresh = windows_blob(cache) | states_blob(cache)
        fresh[GROUPS] = groups_blob(groups)
        kept = [name for name in stored.blob_names if name not in {*fresh, *damage.blobs}]
        writer.commit(
            identity=opened.identity, about=opened.about.as_json(), blobs=fresh, keep_blobs=kept
        )
        return writer.written_bytes


def remake_index(opened: OpenDocument, names: set[str]) -> int:
    """Make the index of a document from its keys and commit it.

    Args:
        names: blobs of the index that are lost.

    Returns:
        Bytes written.

    Raises:
        As `mend`; BudgetError: the document's own budget is too small here.
    """
    memory = opened.budget(opened.about.memory)
    with DocumentWriter.extend(
        opened.folder, key=opened.settings.key, generation=opened.stored.generation
    ) as writer:
        with TieredCache(
            opened.loaded.model, opened.policy, memory, "memory", max_tokens=opened.about.tokens,
            adapter=opened.settings.adapter, past=opened.past(with_index=False),
            known=opened.loaded.known,
        ) as cache:  # fmt: skip
            fresh = index_blobs(cache, writer.shape.layers)
        kept = [name for name in opened.stored.blob_names if name not in {*fresh, *names}]
        writer.commit(
            identity=opened.identity, about=opened.about.as_json(), blobs=fresh, keep_blobs=kept
        )
        return writer.written_bytes


def _exact_cache(opened: OpenDocument, ranges: Ranges) -> TieredCache:
    """A cache that holds what is in front of the first range, and can read what is behind."""
    start = ranges.tokens(*ranges.groups[0])[0]
    groups = np.maximum(opened.groups, 0)  # where a unit is unknown, nothing is read
    return TieredCache(
        opened.loaded.model, KVSwap(group_tokens=opened.about.group_tokens),
        opened.budget(opened.about.memory), opened.settings.store, max_tokens=opened.about.tokens,
        exact=True, past=opened.past(with_index=False, groups=groups), past_tokens=start,
        sealed=opened.settings.sealed, known=opened.loaded.known,
    )  # fmt: skip


def _recompute(
    opened: OpenDocument, cache: TieredCache, ranges: Ranges, progress: OnTokens
) -> None:
    """Prefill damaged ranges behind what is stored in front of them."""
    model: Any = opened.loaded.model
    chunk, done = opened.settings.prefill_chunk_size, 0
    if not cache.takes_chunks:
        chunk = ranges.length
    progress(0, ranges.num_tokens)
    for first, end in ranges.groups:
        start, stop = ranges.tokens(first, end)
        if cache.get_seq_length() < start:
            cache.tiers.restore(1, start)
        hold_positions(cache, opened.pictures.blocks)
        for begin in range(start, stop, chunk):
            part = torch.tensor([opened.tokens[begin : min(begin + chunk, stop)]])
            with torch.no_grad():
                model(
                    part.to(model.device),
                    **cache_argument(model, cache),
                    **position_argument(model, cache, begin, begin + part.shape[1]),
                    use_cache=True,
                    logits_to_keep=1,
                )
            done += part.shape[1]
            progress(done, ranges.num_tokens)


def _store_ranges(
    cache: TieredCache, writer: DocumentWriter, units: NDArray[np.int64], ranges: Ranges,
    progress: OnBytes,
) -> NDArray[np.int64]:  # fmt: skip
    """Append what was recomputed; returns the units of all groups then. [groups]"""
    mended = units.copy()
    for first, end in ranges.groups:
        stop = ranges.tokens(first, end)[1]
        mended[first:end] = store_groups(cache, writer, first, stop, ranges.group_tokens, progress)
    return mended
