"""FetchSurvey: what any group, selection and reuse buffer would fetch behind a text, from one run.

Source: KVSwap (arXiv 2511.11907), appendix A.1 (reuse rate by capacity C).

Differences: the paper's tables are made once, from other text, and know misses only. Here the text
that is measured on is looked at, at the length in question, and requests are counted too: rankings
of a few decode steps, for every group size, are replayed through the engine's own slot table and
coalescing. Slots begin empty, as behind a prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.selection import Selection
from penstock.core.slot_plan import shares_pool
from penstock.engine.fetch_plan import plan_fetch
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import ceil_div
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.group_scores import scores_of_shares
from penstock.methods.kvswap.index import LowRankIndex
from penstock.methods.kvswap.policy import PAPER_SELECTED_TOKENS, KVSwap
from penstock.storage.coalesce import coalesce
from penstock.tuner.engine_run import ROUNDS, STEPS, WARM_STEPS, EngineRun, Workpiece

_UNLIMITED = 1 << 30
"""Units of one request: the engine's limit of a megabyte is out of reach for a selection's runs."""


class FetchSetting(NamedTuple):
    """What decides which units are fetched."""

    group_tokens: int
    selected_groups: int
    num_slots: int
    """Of each layer; 0: two pools that all layers share, where nothing is found again."""
    shared_every: int = 0
    """Layers of every so many share one pool; 0: none does."""

    def slots_of(self, layer: int) -> int:
        """What a layer, counted from 0, finds again lies in so many slots."""
        return 0 if shares_pool(layer, self.shared_every) else self.num_slots


class Fetches(NamedTuple):
    """One sequence, a median step, all layers."""

    missing: float
    """Units."""
    reads: float
    """Requests."""


def survey(
    work: Workpiece, choices: Sequence[FetchSetting], *, rank: int, store: str
) -> dict[FetchSetting, Fetches]:
    """Decode one sequence for as many steps as measured runs do, and replay every choice.

    Ranks with an index of one token a group and 8 bits; the budget is not asked, whose settings
    are what this is to find.

    Args:
        work: of one sequence, behind a real text.
        rank: components of that index.
        store: where reads are not throttled.

    Raises:
        StorageError: the disk is full or cannot be used.
    """
    assert work.batch == 1
    assert work.stream is None
    most = {c.group_tokens: 0 for c in choices}
    for choice in choices:
        most[choice.group_tokens] = max(most[choice.group_tokens], choice.selected_groups)
    rankings = Rankings(most)
    selected = min(PAPER_SELECTED_TOKENS, work.context // 2)
    policy = _Watched(
        group_tokens=1,
        selected_tokens=selected,
        reuse_tokens=selected,
        rank=rank,
        index_bits=8,
        rankings=rankings,
    )
    with EngineRun(work, policy, store=store, limit_bytes=None) as run:
        for _ in range(ROUNDS):
            run.decode(STEPS)
    return {choice: rankings.replay(choice) for choice in choices}


class Rankings:
    """The best groups of every step, layer and group size, best first."""

    def __init__(self, most: dict[int, int]) -> None:
        """
        Args:
            most: groups to keep, by their tokens.
        """
        self._most = most
        self._layers: dict[int, dict[int, list[NDArray[np.int64]]]] = {}
        """By the layer's index (its identity) and tokens of a group, a list of steps. [at most
        most]"""

    def take(self, index: LowRankIndex, query: Tensor, first_token: int, end_token: int) -> None:
        """Rank a layer's groups.

        Args:
            index: with groups of one token.
            query: [1, num_heads, head_dim]
            first_token, end_token: what may be chosen.
        """
        steps = self._layers.setdefault(id(index), {tokens: [] for tokens in self._most})
        logits = index.unit_logits(query, end_token)
        for tokens, most in self._most.items():
            first = ceil_div(first_token, tokens)
            scores = regrouped_scores(logits, tokens)[0, first:]
            best = scores.topk(min(most, len(scores))).indices
            steps[tokens].append(best.cpu().numpy() + first)

    def replay(self, choice: FetchSetting) -> Fetches:
        """What a choice would have fetched."""
        counts = [
            _fetched([best[: choice.selected_groups] for best in steps[choice.group_tokens]],
                     choice.slots_of(layer))
            for layer, steps in enumerate(self._layers.values())
        ]  # fmt: skip
        if not counts:
            return Fetches(0.0, 0.0)
        length = min(len(layer) for layer in counts)
        total = np.sum([layer[:length] for layer in counts], axis=0)
        missing, reads = np.median(total[min(WARM_STEPS, length - 1) :], axis=0)
        return Fetches(float(missing), float(reads))


def regrouped_scores(logits: Tensor, group_tokens: int) -> Tensor:
    """Scores that an index of larger groups, with the same codes, would give.

    Args:
        logits: of each token. [batch, tokens, num_heads]

    Returns:
        float32 [batch, whole groups]
    """
    batch, tokens, heads = logits.shape
    groups = tokens // group_tokens
    whole = logits[:, : groups * group_tokens].reshape(batch, groups, group_tokens, heads)
    return scores_of_shares(whole.amax(2), groups, squares=True)


def _fetched(steps: Iterable[NDArray[np.int64]], num_slots: int) -> NDArray[np.int64]:
    """Missing units and requests of one layer. [steps, 2]"""
    chosen = [np.sort(best) for best in steps]
    units = 1 + max(int(best.max(initial=0)) for best in chosen)
    table, fifo = SlotTable(1, max(1, num_slots), units), FIFO(1, max(1, num_slots))
    out = []
    for best in chosen:
        missing, slots = best, np.arange(len(best))
        if num_slots and len(best):
            plan = plan_fetch(Selection(best[None]), table, fifo)
            missing, slots = plan.units, plan.slots
        out.append((len(missing), len(coalesce(missing, slots, _UNLIMITED).num_units)))
    return np.array(out, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _Watched(KVSwap):
    """KVSwap whose scores are looked at."""

    rankings: Rankings = field(compare=False)

    @override
    def select(
        self, index: KeyIndex, query: Tensor, first_unit: NDArray[np.int64], end_unit: int,
        wanted: int,
    ) -> Selection:  # fmt: skip
        assert isinstance(index, LowRankIndex)
        self.rankings.take(index, query, int(first_unit[0]), end_unit)
        return super().select(index, query, first_unit, end_unit, wanted)
