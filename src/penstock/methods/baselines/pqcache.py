"""PQCache: tokens ranked by product-quantised keys. Source: arXiv 2407.12820."""

from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from penstock.core.choices import Choice
from penstock.core.errors import ConfigError
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import IndexRequest, SelectionPolicy, ceil_div
from penstock.engine.retrieval_policy import SELECTED, BaselinePolicy, IndexSize
from penstock.methods.baselines.product_quantized import ProductQuantizedIndex

CHOICES = ((16, 8), (8, 8), (8, 6), (4, 8), (4, 6), (2, 8), (2, 6), (2, 4))
"""Parts of a key and bits of a part, best first."""


@dataclass(frozen=True, kw_only=True)
class PQCache(BaselinePolicy):
    """Tokens found by approximate inner products, per KV head.

    Source: PQCache (Zhang et al., SIGMOD 2025, arXiv 2407.12820), section 3. Parts and bits are its
    own parameters (its code runs 2 parts of 6 bits) and give way to the budget. New tokens take
    existing centroids for good, DynaKV's "static update" (section 2.3 of that paper, which
    compares with PQCache on flash).

    Differences: the original keeps KV in host memory and codes partly there; here KV lies in the
    store and codes and centroids in fast memory, one byte per code. Slots are reused in FIFO order
    by token; the original caches blocks of tokens by LFU. k-means sees a sample of the prompt and
    runs when the first step needs it, not overlapped with prefill. Query heads that share a KV head
    add their logits. A prompt that is a few tokens long makes poor centroids for a long answer.
    """

    name: ClassVar[str] = "pqcache"
    per_head: ClassVar[bool] = True

    subvectors: int | None = None
    """Parts of a key, the paper's m, a divisor of head_dim; None: chosen from the budget."""
    bits: int | None = None
    """2^bits centroids a part, the paper's b, 1 to 8; None: chosen from the budget."""

    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("subvectors", (None, 16, 8, 4, 2), "parts of a key, the paper's m"),
        Choice("bits", (None, 8, 6), "bits of a part, the paper's b"),
        SELECTED,
    )
    """Parts and bits are chosen together, or both left to the plan."""

    @override
    def __post_init__(self) -> None:
        BaselinePolicy.__post_init__(self)
        if self.subvectors is not None and self.subvectors < 1:
            raise ConfigError(f"subvectors={self.subvectors} must be at least 1")
        if self.bits is not None and not 1 <= self.bits <= 8:
            raise ConfigError(f"bits={self.bits} must be 1 to 8")

    @property
    @override
    def repeats_another(self) -> bool:
        """Half a choice ends as one of the whole ones."""
        return super().repeats_another or (self.subvectors is None) != (self.bits is None)

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple["SelectionPolicy", IndexSize]]:
        shape, out = request.shape, []
        if self.subvectors is not None and shape.head_dim % self.subvectors:
            raise ConfigError(
                f"subvectors={self.subvectors} does not divide head_dim={shape.head_dim}"
            )
        wanted = [(self.subvectors or parts, self.bits or bits) for parts, bits in CHOICES]
        fitting = [choice for choice in wanted if shape.head_dim % choice[0] == 0]
        for parts, bits in dict.fromkeys(fitting or [(1, self.bits or 8)]):
            sizes = {
                "batch": request.batch, "group_tokens": self.group_tokens,
                "max_units": ceil_div(request.max_tokens, self.group_tokens),
                "subvectors": parts, "bits": bits,
            }  # fmt: skip
            held = ProductQuantizedIndex.num_bytes(shape, **sizes)
            scratch = ProductQuantizedIndex.scratch_bytes(shape, **sizes)
            policy: SelectionPolicy = replace(self, subvectors=parts, bits=bits)
            out.append((policy, IndexSize(held, scratch)))
        return out

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        assert self.subvectors is not None, "plan() makes the choices"
        assert self.bits is not None, "plan() makes the choices"
        return ProductQuantizedIndex(
            request.shape, batch=request.batch, max_units=request.max_units,
            group_tokens=request.group_tokens, subvectors=self.subvectors, bits=self.bits,
            device=request.device,
        )  # fmt: skip
