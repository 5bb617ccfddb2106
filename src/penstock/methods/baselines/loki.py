"""Loki: tokens ranked by principal components of their keys. Source: arXiv 2406.02542."""

from dataclasses import dataclass
from typing import ClassVar

from penstock.methods.baselines.partial_keys import PartialKeysPolicy
from penstock.methods.baselines.principal_keys import PrincipalKeysIndex, ProjectedKeysIndex


@dataclass(frozen=True, kw_only=True)
class Loki(PartialKeysPolicy):
    """Approximate attention in the first principal components of each head's keys.

    Source: Loki (arXiv 2406.02542), section 4; as a predictor in front of InfiniGen's runtime on a
    disk, KVSwap section 4.2. `key_ratio` is its d_f, 0.25 in the original; KVSwap's setting A tunes
    it to the budget.

    Differences: the original calibrates its bases offline; here each row's own prompt gives them,
    by a sample of its post-rotary keys. It attends in memory and keeps whole keys, turned; here the
    remaining components are in the store with the values, and all K and V of the selection is read.
    Its selection is a share k_f of the context, here a fixed number of tokens; query heads that
    share a KV head add their logits and select together; the query is predicted from the layer
    before.
    """

    name: ClassVar[str] = "loki"
    index_class: ClassVar[type[ProjectedKeysIndex]] = PrincipalKeysIndex
