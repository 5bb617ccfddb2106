"""LeoAM-like: chunks ranked coarse to fine by their abstracts. Source: arXiv 2506.20187."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import (
    SELECTED,
    SELECTED_TOKENS,
    BaselinePolicy,
    IndexSize,
)
from penstock.methods.baselines.chunk_bounds import ChunkBoundsIndex

MOST_FINE_UNITS = 8
"""Units of the largest fine chunk that a tight budget leads to."""


@dataclass(frozen=True, kw_only=True)
class LeoAM(BaselinePolicy):
    """Chunks of several sizes, judged by small abstracts and looked into only where it pays.

    Source: LeoAM (arXiv 2506.20187); HillInfer section 5.1 compares with a "LeoAM-like" baseline
    that takes its evaluation of importance and its KV abstract, and so does this one.

    Like the original: large chunks are judged first and the promising ones are split into small
    ones; a chunk is judged by an abstract and not by its keys; chunks are what is read.

    Differences: two sizes a layer, 8 to 1, the same in all layers, where the original adapts sizes
    to each layer's skew; the number opened is fixed, four selections of tokens. An abstract is the
    range of each key component and importance its upper bound, added over all heads of the layer:
    our reading of the method. Abstracts stay in memory, since the original's lie on its disk; under
    a budget the small chunks become larger instead (`fine_tokens`). Its compression of data in
    flight and its pipeline of three tiers are left out; the query is the layer's own.
    """

    name: ClassVar[str] = "leoam"

    group_tokens: int = 16
    """Tokens of a unit, the smallest chunk that is read."""
    fine_tokens: int | None = None
    """Tokens of a small chunk, whole units; None: the fewest that the budget allows."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("group_tokens", (8, 16, 32, 64), "tokens of the smallest chunk that is read"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        fine = self.fine_tokens
        if fine is not None and (fine < self.group_tokens or fine % self.group_tokens):
            raise ConfigError(
                f"fine_tokens={fine} must be a multiple of group_tokens={self.group_tokens}"
            )

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        """Small chunks of one unit, of two, of four, ..."""
        shape, batch = request.shape, request.batch
        max_units = ceil_div(request.max_tokens, self.group_tokens)
        most = max_units if request.limit_bytes is None else SELECTED_TOKENS // self.group_tokens
        if self.selected_tokens is not None:
            most = self.selected_tokens // self.group_tokens
        counts = [1]
        while counts[-1] < MOST_FINE_UNITS:
            counts.append(2 * counts[-1])
        if self.fine_tokens is not None:
            counts = [self.fine_tokens // self.group_tokens]
        sizes: list[tuple[SelectionPolicy, IndexSize]] = []
        for count in counts:
            held = ChunkBoundsIndex.num_bytes(
                shape, batch=batch, max_units=max_units, fine_units=count
            )
            scratch = ChunkBoundsIndex.scratch_bytes(
                shape, batch=batch, max_units=max_units, fine_units=count,
                selected_units=max(1, min(most, max_units)),
            )  # fmt: skip
            policy = replace(self, fine_tokens=count * self.group_tokens)
            sizes.append((policy, IndexSize(held, scratch)))
        return sizes

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        assert self.fine_tokens is not None, "plan() makes the choices"
        return ChunkBoundsIndex(
            request.shape, batch=request.batch, max_units=request.max_units,
            group_tokens=request.group_tokens,
            fine_units=self.fine_tokens // request.group_tokens,
            selected_units=request.selected_units, device=request.device,
        )  # fmt: skip
