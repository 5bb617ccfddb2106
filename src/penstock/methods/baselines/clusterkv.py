"""ClusterKV: tokens recalled by clusters of their keys. Source: arXiv 2412.03213."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, BaselinePolicy, IndexSize
from penstock.methods.baselines.token_clusters import TokenClustersIndex

FINER = ((20, 320), (40, 320))
"""Tokens of a cluster and new tokens clustered together, where a budget has room for them: a step
selects fewer tokens here than the 1,024 and more that the published clusters are made for."""
CHOICES = ((80, 320), (80, 160), (80, 80), (160, 0), (320, 0))
"""The same, best first; the first as published."""


@dataclass(frozen=True, kw_only=True)
class ClusterKV(BaselinePolicy):
    """Recall of semantic clusters, per KV head.

    Source: ClusterKV (Liu et al., arXiv 2412.03213): one cluster per 80 tokens of the prompt; every
    320 generated tokens are clustered among themselves; clusters are taken by q . centroid until
    the budget of tokens is full, the last one in part. The number of clusters gives way to the
    budget, and the clustering of generated tokens ("local update" in section 2.3 of DynaKV, which
    compares with ClusterKV on flash) before that, down to none.

    Differences: under a budget with room for them, clusters have 20 or 40 tokens (`FINER`): of 400
    selected tokens, clusters of 80 leave five. KV lies in the store, and slots are reused in FIFO
    order by token; the original keeps KV in host memory and caches the clusters of the last steps.
    k-means sees a sample of the prompt, padding and sinks (the original has 16 of them) included.
    Generated tokens have clusters at the prompt's rate, 4 for 320 (the original's benchmark makes 8
    of them). Generated tokens that are not clustered yet and have left the window belong to the
    nearest cluster; the original attends to all of them. Query heads that share a KV head add their
    logits. Its first two layers are exempt with `full_layers=2` only.
    """

    name: ClassVar[str] = "clusterkv"
    per_head: ClassVar[bool] = True

    tokens_per_cluster: int | None = None
    """Tokens of a cluster on average; None: chosen from the budget."""
    recluster_tokens: int | None = None
    """Generated tokens that are clustered together, at least `tokens_per_cluster`; 0: they join the
    nearest cluster for good; None: chosen from the budget."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tokens_per_cluster", (None, 40, 80, 160, 320), "tokens of a cluster on average"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        BaselinePolicy.__post_init__(self)
        per_cluster, together = self.tokens_per_cluster, self.recluster_tokens
        if per_cluster is not None and per_cluster < 1:
            raise ConfigError(f"tokens_per_cluster={per_cluster} must be at least 1")
        if together is not None and together != 0 and together < (per_cluster or 1):
            raise ConfigError(
                f"recluster_tokens={together} must be 0 or at least "
                f"tokens_per_cluster={per_cluster or 1}"
            )

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        out = []
        for per_cluster, together in self._choices(finer=request.limit_bytes is not None):
            sizes = {
                "batch": request.batch, "group_tokens": self.group_tokens,
                "max_units": ceil_div(request.max_tokens, self.group_tokens),
                "tokens_per_cluster": per_cluster, "recluster_tokens": together,
            }  # fmt: skip
            held = TokenClustersIndex.num_bytes(request.shape, **sizes)
            scratch = TokenClustersIndex.scratch_bytes(request.shape, **sizes)
            policy: SelectionPolicy = replace(
                self, tokens_per_cluster=per_cluster, recluster_tokens=together
            )
            out.append((policy, IndexSize(held, scratch)))
        return out

    def _choices(self, *, finer: bool) -> list[tuple[int, int]]:
        """Tokens of a cluster and new tokens clustered together, best first."""
        out = []
        for per_cluster, together in (*FINER, *CHOICES) if finer else CHOICES:
            if self.recluster_tokens is not None:
                together = self.recluster_tokens
            if self.tokens_per_cluster is not None:
                per_cluster = self.tokens_per_cluster
                if self.recluster_tokens is None and together:
                    together = max(together, per_cluster)
            elif together:
                per_cluster = min(per_cluster, together)
            out.append((per_cluster, together))
        return list(dict.fromkeys(out))

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        assert self.tokens_per_cluster is not None, "plan() makes the choices"
        assert self.recluster_tokens is not None, "plan() makes the choices"
        return TokenClustersIndex(
            request.shape, batch=request.batch, max_units=request.max_units,
            group_tokens=request.group_tokens, tokens_per_cluster=self.tokens_per_cluster,
            recluster_tokens=self.recluster_tokens, device=request.device,
        )  # fmt: skip
