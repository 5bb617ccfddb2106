"""PartialKeysPolicy: methods that rank tokens by a few components of their keys."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, BaselinePolicy, IndexSize
from penstock.methods.baselines.principal_keys import ProjectedKeysIndex


@dataclass(frozen=True, kw_only=True)
class PartialKeysPolicy(BaselinePolicy):
    """Loki and InfiniGen, as KVSwap section 4.2 runs both: one runtime, two predictors.

    Partial keys stay in fast memory and rank tokens, for a query predicted from the input of the
    layer before; K and V of the selected tokens are read whole, and nothing is reused. The first
    layer has none before it and waits for its own query.
    """

    per_head: ClassVar[bool] = True
    index_class: ClassVar[type[ProjectedKeysIndex]]

    reuse_tokens: int | None = 0
    """See `BaselinePolicy.reuse_tokens`."""
    key_ratio: float | None = None
    """Share of a key's components that the index keeps; None: the largest up to a half that leaves
    room for a selection."""
    predict: bool = True
    """Predict layer i's query from layer i-1's input and prefetch."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("key_ratio", (None, 0.5, 0.25, 0.125), "share of a key that the index keeps"),
        SELECTED,
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_ratio is not None and not 0 < self.key_ratio <= 1:
            raise ConfigError(f"key_ratio={self.key_ratio} must be above 0 and at most 1")

    @property
    @override
    def predicts(self) -> bool:
        return self.predict

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        """Components of a key, half of them first."""
        shape, batch = request.shape, request.batch
        tokens = ceil_div(request.max_tokens, self.group_tokens) * self.group_tokens
        half = max(1, shape.head_dim // 2)
        counts = [half, *(d for d in range(half - 1, 0, -1) if d % 2 == 0 or d < 4)]
        if self.key_ratio is not None:
            counts = [self._dims(shape.head_dim)]
        sizes: list[tuple[SelectionPolicy, IndexSize]] = []
        for dims in counts:
            size = {"batch": batch, "max_tokens": tokens, "dims": dims}
            held = ProjectedKeysIndex.num_bytes(shape, **size)
            scratch = ProjectedKeysIndex.scratch_bytes(shape, **size, on_cpu=request.device_is_cpu)
            policy = replace(self, key_ratio=dims / shape.head_dim)
            sizes.append((policy, IndexSize(held, scratch)))
        return sizes

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return self.index_class(
            request.shape, batch=request.batch,
            max_tokens=request.max_units * request.group_tokens,
            group_tokens=request.group_tokens, dims=self._dims(request.shape.head_dim),
            device=request.device,
        )  # fmt: skip

    def _dims(self, head_dim: int) -> int:
        assert self.key_ratio is not None, "plan() makes the choices"
        return max(1, round(self.key_ratio * head_dim))
