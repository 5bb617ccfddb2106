"""InfiniGen and its two variants: skewed partial keys. Source: Lee et al., OSDI 2024."""

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.choices import Choice
from penstock.methods.baselines.partial_keys import PartialKeysPolicy
from penstock.methods.baselines.principal_keys import ProjectedKeysIndex, SkewedKeysIndex


@dataclass(frozen=True, kw_only=True)
class InfiniGen(PartialKeysPolicy):
    """Speculation one layer ahead over some columns of skewed keys; tokens per KV head.

    Source: InfiniGen (Lee et al., OSDI 2024), section 4; with GQA and on a disk as in KVSwap
    section 4.2. `key_ratio` is its partial weight ratio: KVSwap's setting A tunes it to the budget,
    setting B takes 0.5.

    Differences: a step selects a fixed number of tokens. The original takes those within alpha of
    the largest logit, counts them as the mean over all heads, and takes at most a fifth of the
    context. The query is projected whole and then reduced, so that partial query weights, and
    their memory, are not needed. Its pool in host memory with eviction is the store here. The first
    layer selects too. For rotation and columns see `SkewedKeysIndex`; query heads that share a KV
    head add their logits.
    """

    name: ClassVar[str] = "infinigen"
    index_class: ClassVar[type[ProjectedKeysIndex]] = SkewedKeysIndex


@dataclass(frozen=True, kw_only=True)
class InfiniGenStar(InfiniGen):
    """InfiniGen* of KVSwap section 4.2: one selection for all heads, by the sum of their logits.

    Source: KVSwap (arXiv 2511.11907), section 4.2, Fig. 6 without its groups.

    Differences: as InfiniGen; logits are added as they are, as that paper's artifact does.
    """

    name: ClassVar[str] = "infinigen-star"
    per_head: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class InfiniGenStarReuse(InfiniGenStar):
    """InfiniGen*+ru of KVSwap section 4.2: InfiniGen* whose selected tokens stay in slots.

    Source: KVSwap (arXiv 2511.11907), sections 3.4 and 4.2.

    Differences: as InfiniGenStar; with more slots than a selection needs (`reuse_tokens`), what
    they still hold is attended to, as under KVSwap here. Under a budget without room for slots in
    each layer nothing is reused.
    """

    name: ClassVar[str] = "infinigen-star-reuse"

    reuse_tokens: int | None = None
    """See `BaselinePolicy.reuse_tokens`; None: one selection."""

    choices: ClassVar[tuple[Choice, ...]] = (
        *InfiniGenStar.choices,
        Choice("reuse_tokens", (1600, 800, None), "tokens kept from step to step"),
    )
