"""RaaS: tokens keep their place while they are attended to. Source: arXiv 2502.11147."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.methods.baselines.attention_history import TimeStamps
from penstock.methods.baselines.forgetting import HistoryPolicy


@dataclass(frozen=True, kw_only=True)
class RaaS(HistoryPolicy):
    """Time stamps renewed by attention; the oldest stamp goes, per KV head.

    Source: RaaS (arXiv 2502.11147), section 3.

    Differences: units are tokens (the original: pages of 16 with Quest's representatives, whose
    estimated weights renew the stamps; here the true weights do). The prompt is kept for good, as
    in the original, where it fits in `selected_tokens`; a longer one is cut by the same rule, its
    last `window_queries` queries taken as steps, and its tokens compete ever after. Tokens leave
    the recency window with the stamp of that step. Query heads that share a KV head are averaged.
    Equal stamps are ordered by the weight that renewed them. Without queries of the prompt a
    token's first stamp is its position.
    """

    name: ClassVar[str] = "raas"

    threshold: float = 1e-4
    """Least weight that renews a stamp, the paper's alpha."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.threshold < 1.0:
            raise ConfigError(f"threshold={self.threshold} must be between 0 and 1")

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return TimeStamps(
            request.shape, batch=request.batch, max_units=request.max_units,
            scaling=request.scaling, device=request.device,
            selected_units=request.selected_units, window_queries=self.window_queries,
            threshold=self.threshold,
        )  # fmt: skip
