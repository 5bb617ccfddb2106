"""H2O: the tokens with the most attention so far, and the newest. Source: arXiv 2306.14048."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest
from penstock.methods.baselines.attention_history import HeavyHitters
from penstock.methods.baselines.forgetting import HistoryPolicy


@dataclass(frozen=True, kw_only=True)
class H2O(HistoryPolicy):
    """Heavy hitters by accumulated attention, beside recent tokens, per KV head.

    Source: H2O (arXiv 2306.14048), section 4, Algorithm 1.

    Differences: `selected_tokens` are the heavy hitters and the window is the recent part; the
    original gives each half of its budget, which is `window_tokens` = `selected_tokens` here. The
    prompt's attention is accumulated over its last `window_queries` queries (the original: all of
    them), and the cut is made once, after it. Attention that a token receives in the window is not
    counted while decoding: it leaves the window with the least sum of those kept and is tried
    against the weakest. Query heads that share a KV head add their weights (the original is for
    MHA). Without queries of the prompt the newest tokens are kept.
    """

    name: ClassVar[str] = "h2o"

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return HeavyHitters(
            request.shape, batch=request.batch, max_units=request.max_units,
            scaling=request.scaling, device=request.device, window_queries=self.window_queries,
        )  # fmt: skip
