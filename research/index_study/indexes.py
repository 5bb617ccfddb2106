"""The indexes of the study: the product's own, and plain forms of what else was thought of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.index_fit import sample_units
from penstock.methods.kvswap.index import LowRankIndex
from research.index_study.bases import (
    Basis,
    apart,
    by_covariance,
    by_scale,
    fit,
    joint,
    received,
)
from research.index_study.codes import (
    Quantiser,
    after_random_rotation,
    by_channel,
    components_of,
    eight_bits,
    four_bits,
    in_columns,
)
from research.index_study.layer import GROUP_TOKENS, SINK_TOKENS, Layer, Truth

BLOCK = 64
"""Tokens of a block in all families but those that vary it."""
BLOCKS = (16, 32, 64, 128, 256)
RANKS = (8, 16, 24, 32, 48, 64)
COLUMNS = (16, 32, 48, 64, 80, 96)
"""Columns of 4 bits: 8 to 48 bytes."""
_SHORTLIST = 10
"""One group in so many goes into the second stage."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """One index at one size."""

    family: str
    size: float
    """Bytes a token and layer."""
    scores: Callable[[], Tensor]
    """Of groups. float32 [queries, groups]"""

    @property
    def name(self) -> str:
        """Of the index in tables and results."""
        return f"{self.family}, {self.size:g} B"


class Indexes:
    """All indexes of one layer; bases are made once."""

    def __init__(self, layer: Layer, truth: Truth, other: Layer) -> None:
        """Nothing is fitted yet.

        Args:
            other: the same layer's keys and queries of another text.
        """
        self._layer, self._truth, self._other = layer, truth, other
        self._width = joint(layer.keys).shape[1]
        self._heads = len(layer.keys)

    def __iter__(self) -> Iterator[Index]:
        yield from self._product()
        yield from self._blocks()
        yield from self._weights()
        yield from self._bits()
        yield from self._fitted_elsewhere()
        yield from self._stages()
        yield from self._whole_keys()

    # The product's ----------------------------------------------------------------------------

    def _product(self) -> Iterator[Index]:
        for rank in self._ranks(RANKS):
            yield Index(
                family="product, keys after RoPE", size=rank,
                scores=partial(self._scores_of_product, rank=rank, bits=8, turned=False),
            )  # fmt: skip
        if self._layer.rotation is None:
            return
        for rank in self._ranks(COLUMNS):
            yield Index(
                family="product, by blocks", size=rank / 2,
                scores=partial(self._scores_of_product, rank=rank, bits=4, turned=True),
            )  # fmt: skip

    def _scores_of_product(self, *, rank: int, bits: int, turned: bool) -> Tensor:
        layer = self._layer
        kv_heads, _, dim = layer.keys.shape
        units = layer.ends
        keys = layer.keys[:, : units * GROUP_TOKENS].transpose(0, 1).unsqueeze(0)
        shape = KVShape(
            num_layers=1, num_query_heads=len(layer.asked), num_kv_heads=kv_heads, head_dim=dim,
            dtype=torch.float32,
        )  # fmt: skip
        index = LowRankIndex(
            shape, batch=1, max_units=units, group_tokens=GROUP_TOKENS, rank=rank, bits=bits,
            head_reduction="softmax", scaling=layer.scaling, adapter=None,
            device=torch.device("cpu"), rotation=layer.rotation if turned else None,
        )  # fmt: skip
        if index.wanted_queries:
            index.see_queries(layer.kept[None, :, -index.wanted_queries :])
        chosen = torch.from_numpy(sample_units(units, 1, GROUP_TOKENS))
        places = (chosen[:, None] * GROUP_TOKENS + torch.arange(GROUP_TOKENS)).flatten()
        index.fit(keys[:, places], places)
        index.append(keys, 0)
        asked = layer.asked.transpose(0, 1)
        scores = [index.score(query[None], units) for query in asked]
        return torch.cat(scores)[:, SINK_TOKENS // GROUP_TOKENS :]

    # Plain forms ------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[Index]:
        """The lead, and how large a block may be: energy, 8 bits."""
        for block, name in ((0, "keys after RoPE"), (1, "keys before RoPE")):
            yield from self._linear(name, partial(fit, self._layer, block), block)
        for block in BLOCKS:
            name = f"blocks of {block}"
            yield from self._linear(name, partial(fit, self._layer, block), block)
        for block in (1, *BLOCKS):
            basis = partial(fit, self._layer, block, weight=self._scale)
            ranks = (16, 32, 64)
            yield from self._columns(f"chosen, blocks of {block}", basis, block, ranks)

    def _weights(self) -> Iterator[Index]:
        """What the components are chosen for."""
        layer, outside = self._layer, self._truth.heads
        chosen = partial(fit, layer, BLOCK)
        yield from self._linear("seen by queries", partial(chosen, weight=self._scale), BLOCK)
        few = (16, 32)
        whole = partial(chosen, weight=by_covariance(layer, BLOCK))
        yield from self._linear("covariance of queries", whole, BLOCK, few)
        louder = partial(chosen, weight=by_scale(layer, heads=outside / outside.mean()))
        yield from self._linear("heads by their mass", louder, BLOCK, few)
        attended = partial(chosen, weight=self._scale, tokens=received(layer))
        yield from self._linear("keys by their attention", attended, BLOCK, few)
        yield from self._linear("mean taken off", partial(chosen, centred=True), BLOCK, few)
        both = partial(chosen, weight=self._scale, centred=True)
        yield from self._linear("seen by queries, mean taken off", both, BLOCK, few)

    def _bits(self) -> Iterator[Index]:
        """How components are stored."""
        energy = partial(fit, self._layer, BLOCK)
        yield from self._columns("energy, mixed bits", energy, BLOCK)
        yield from self._columns("chosen", self._chosen, BLOCK)
        for columns in self._ranks((16, 32, 64)):
            scores = partial(self._scores, self._chosen, columns, four_bits, BLOCK)
            yield Index(family="seen by queries, 4 bits", size=columns / 2, scores=scores)
        yield from self._columns("chosen, exponentials added", self._chosen, BLOCK, add=True)

    def _fitted_elsewhere(self) -> Iterator[Index]:
        """Bases of another text."""
        energy = partial(fit, self._other, BLOCK)
        yield from self._linear("another text's, energy", energy, BLOCK, (16, 32))
        other = partial(fit, self._other, BLOCK, weight=by_scale(self._other))
        yield from self._columns("another text's", other, BLOCK)
        keys = partial(fit, self._other, BLOCK, weight=self._scale)
        yield from self._columns("another text's keys, own queries", keys, BLOCK, (16, 32, 64))

    def _stages(self) -> Iterator[Index]:
        """A short code for all groups, the whole one for the best tenth: bytes that are read."""
        for first, columns in ((8, 32), (16, 32), (16, 64), (32, 64)):
            if columns > self._width:
                continue
            size = first / 2 + (columns - first) / 2 / _SHORTLIST
            scores = partial(self._two_stages, first, columns)
            name = f"two stages, {first} of {columns} columns"
            yield Index(family=name, size=size, scores=scores)

    def _whole_keys(self) -> Iterator[Index]:
        layer, width = self._layer, self._width
        yield Index(
            family="whole keys, 4 bits by channel", size=width / 2,
            scores=lambda: layer.scores(by_channel(layer.keys, 4)),
        )  # fmt: skip
        for bits in (1, 2, 3):
            size = width * bits / 8 + 2 * self._heads
            yield Index(
                family="whole keys, turned at random", size=size,
                scores=partial(self._turned_at_random, 0, bits),
            )  # fmt: skip
            yield Index(
                family="whole keys before RoPE, turned at random", size=size,
                scores=partial(self._turned_at_random, 1, bits),
            )  # fmt: skip

    # Their parts ------------------------------------------------------------------------------

    def _ranks(self, wanted: tuple[int, ...]) -> list[int]:
        return [rank for rank in wanted if rank <= self._width]

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        return by_scale(self._layer)

    @cached_property
    def _chosen_basis(self) -> Basis:
        return fit(self._layer, BLOCK, weight=self._scale)

    def _chosen(self) -> Basis:
        return self._chosen_basis

    def _linear(
        self, family: str, basis: Callable[[], Basis], block: int, ranks: tuple[int, ...] = RANKS
    ) -> Iterator[Index]:
        """Components of 8 bits."""
        made = _once(basis)
        for rank in self._ranks(ranks):
            scores = partial(self._scores, made, rank, eight_bits, block)
            yield Index(family=family, size=rank, scores=scores)

    def _columns(
        self, family: str, basis: Callable[[], Basis], block: int,
        wanted: tuple[int, ...] = COLUMNS, *, add: bool = False,
    ) -> Iterator[Index]:  # fmt: skip
        """Columns of 4 bits."""
        made = _once(basis)
        for columns in self._ranks(wanted):
            rank = components_of(columns)
            scores = partial(self._scores, made, rank, in_columns(columns), block, add=add)
            yield Index(family=family, size=columns / 2, scores=scores)

    def _scores(
        self, basis: Callable[[], Basis], rank: int, quantiser: Quantiser, block: int, *,
        add: bool = False,
    ) -> Tensor:  # fmt: skip
        """Of codes of the first components."""
        return self._layer.scores(self._rebuilt(basis(), rank, quantiser, block), add=add)

    def _rebuilt(self, basis: Basis, rank: int, quantiser: Quantiser, block: int) -> Tensor:
        """What the codes say the keys are: its logits are those of the turned queries' codes."""
        keys = joint(self._layer.turned_back(block)) - basis.mean
        codes = quantiser(keys @ basis.encoder[:, :rank])
        known = codes @ basis.decoder[:, :rank].T + basis.mean
        return self._layer.turned_on(apart(known, self._heads), block)

    def _two_stages(self, first: int, columns: int) -> Tensor:
        basis, rank = self._chosen(), components_of(columns)
        fine = columns - rank

        def short(components: Tensor) -> Tensor:
            whole = in_columns(columns)(components)
            whole[:, first - fine :] = 0.0
            return whole

        found = self._layer.scores(self._rebuilt(basis, rank, short, BLOCK))
        scores = self._layer.scores(self._rebuilt(basis, rank, in_columns(columns), BLOCK))
        best = found.topk(found.shape[1] // _SHORTLIST, dim=-1).indices
        kept = torch.zeros_like(scores).scatter_(1, best, 1.0)
        return scores * kept

    def _turned_at_random(self, block: int, bits: int) -> Tensor:
        known = after_random_rotation(self._layer.turned_back(block), bits)
        return self._layer.scores(self._layer.turned_on(known, block))


def _once(make: Callable[[], Basis]) -> Callable[[], Basis]:
    """A function that calls `make` when it is first asked."""
    made: list[Basis] = []

    def get() -> Basis:
        if not made:
            made.append(make())
        return made[0]

    return get
