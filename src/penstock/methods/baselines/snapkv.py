"""SnapKV: the prompt is cut to what its last queries attend to. Source: arXiv 2404.14469."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.methods.baselines.attention_history import ObservationVotes
from penstock.methods.baselines.forgetting import HistoryPolicy


@dataclass(frozen=True, kw_only=True)
class SnapKV(HistoryPolicy):
    """One cut after the prompt, by the attention of its observation window, per KV head.

    Source: SnapKV (arXiv 2404.14469), section 4: weights of the window's queries are added over the
    prompt before it and pooled; the tokens with the most votes are kept, with the window itself.

    Differences: the budget stays what it is while decoding (the original keeps every decoded token
    beside the cut): decoded tokens that leave the recency window take what room the prompt leaves,
    and the oldest of them goes first when it is full; where the prompt alone fills the budget they
    are kept for the recency window only. Query heads that share a KV head add their weights.
    Pooling is the average (the paper's text and code have both). A later prompt votes on all that
    is alive. Without queries of the prompt the newest tokens are kept.
    """

    name: ClassVar[str] = "snapkv"

    kernel_tokens: int = 7
    """Width of the pooling, odd."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_tokens < 1 or self.kernel_tokens % 2 == 0:
            raise ConfigError(f"kernel_tokens={self.kernel_tokens} must be odd and positive")

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return ObservationVotes(
            request.shape, batch=request.batch, max_units=request.max_units,
            scaling=request.scaling, device=request.device, window_queries=self.window_queries,
            kernel_tokens=self.kernel_tokens,
        )  # fmt: skip
