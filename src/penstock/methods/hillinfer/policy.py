"""HillInfer: hot and cold pools, scored on both sides at once. Source: HillInfer, whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from penstock.core.byte_size import parse_bytes
from penstock.core.choices import Choice
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.shape import KVShape
from penstock.core.slot_plan import SizingRequest, SlotPlan
from penstock.engine.key_index import KeyIndex
from penstock.engine.layer import Layer
from penstock.engine.layer_builder import LayerBuilder
from penstock.engine.policy import IndexRequest, SelectionPolicy, StoreRequest, ceil_div
from penstock.engine.retrieval_policy import BaselinePolicy, IndexSize
from penstock.engine.sizing import largest_plan
from penstock.kernels.key_rounding import KeyDtype
from penstock.methods.hillinfer.host_pool import HostPoolLayer, host_pool_bytes
from penstock.methods.hillinfer.hot_cold import DECAY_STEPS, HotCold, Placement
from penstock.methods.hillinfer.index import NearIndex
from penstock.methods.hillinfer.layer import NearLayer
from penstock.methods.hillinfer.near_storage.address import split_devices
from penstock.methods.hillinfer.near_storage.cold_keys import ColdKeys
from penstock.methods.hillinfer.near_storage.device_memory import DeviceMemory
from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_storage.refill import BATCH_BYTES
from penstock.methods.hillinfer.near_storage.scorer import LocalScorer, Scorer
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings, Rule, ScoreSettings
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.methods.hillinfer.near_storage.tls import FILE, FINGERPRINT, Trust
from penstock.methods.hillinfer.near_work import NearWork
from penstock.storage.documents.key_sources import read_key
from penstock.storage.store import KVStore

ALPHAS = (0.2, 0.15, 0.1, 0.05, 0.025, 0.0125)
"""Shares of the context that a step selects, best first (section 5.3: 10 to 20 %)."""
PLACEMENTS = ("both", "pin", "table", "naive")
KEY_DTYPES: dict[torch.dtype, KeyDtype] = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
}  # fmt: skip
RULES = ("attention", "products")


@dataclass(frozen=True, kw_only=True)
class HillInfer(BaselinePolicy):
    """The query goes to the keys: a near-storage device scores what is cold, the host what is hot.

    Source: "HillInfer: Efficient Long-Context LLM Inference on the Edge with Hierarchical KV
    Eviction using SmartSSD", section 4. Tokens in the slots are the hot pool, and are scored from
    there; all others are the cold pool, which a separate process owns, keeps codes of and scores
    (`near_storage`). Each step attends to the `alpha` most important of both; what of it was cold
    is promoted into slots, and as much demoted, by pinning and a hit table (`HotCold`). How many
    tokens are hot is solved from measured rates within the budget (`work_split`), again when they
    drift. On a GPU the slots are the GPU's, or with `host_memory` the host's, as in the paper.

    Differences: the SmartSSD is a process on this machine; keys are cast to 8 or 4 bits once and
    not at every step; importance is by default the share of the softmax, added over query heads,
    which takes a second, short round, since raw products added over heads (`rule=products`, the
    paper's CEC) rank otherwise on models with several heads; a demoted token is not written again,
    since the device has had it since it left the window. Sinks and window are as in all methods of
    this engine. More is stated at the parts: `ColdKeys`, `NearIndex`, `HotCold`, `work_split`.
    """

    name: ClassVar[str] = "hillinfer"
    shares_units: ClassVar[bool] = False
    can_keep_whole: ClassVar[bool] = False

    alpha: float | None = None
    """Share of the context that a step selects; None: 0.2, or less where the budget is tight;
    `selected_tokens` goes before it."""
    hot_tokens: int | None = None
    """Tokens of the hot pool; None: solved from measured rates (Eq. 4), at most what fits."""
    rule: Rule = "attention"
    """Importance: "attention" or "products" (see `ScoreSettings`)."""
    bits: int = 8
    """Of the keys that the cold pool is scored by, 8 or 4."""
    attend: Literal["selected", "hot"] = "selected"
    """"selected": to what was selected; "hot": to all of the hot pool, which costs no reads."""
    placement: Placement = "both"
    """What decides who is demoted: "both", "pin", "table" or "naive" (see `HotCold`)."""
    decay_steps: int = DECAY_STEPS
    """Steps after which hits count half."""
    near: bool = True
    """Whether near-storage devices score the cold pool; false: this process does, with the codes in
    its own memory."""
    devices: int | str = 1
    """Near-storage devices, over which the cold pool is striped: how many processes of this
    machine; or those of other hosts, "tcp://host:port,..." (`penstock device serve`)."""
    copies: int = 1
    """Devices that have each unit, 1 or 2. With 2 the answer goes on without a device."""
    device_memory: int | str | None = None
    """Most memory that a near-storage device holds beside what it shares with this process: bytes,
    or "256MiB"; None: no bound. Codes that do not fit are made from its disk at every step."""
    device_key: str = ""
    """Where the key of other hosts is: "file:PATH"."""
    device_tls: str = ""
    """Whom to trust as other hosts, by TLS: "file:PATH", certificates in PEM; "sha256:HEX", the
    fingerprint of their one certificate; empty: what goes to them is not encrypted."""
    scorer_threads: int = 1
    """Threads of each device, or of this process with near=false; 0: as OpenMP says."""
    block_tokens: int = 4096
    """Tokens of a score block."""
    host_memory: int | str | None = None
    """Beside a GPU, the paper's three tiers: memory of the host for the hot pool, which lies there
    and is scored by the processor, while the GPU holds window and selection: bytes, or "2GiB".
    None: the hot pool lies where attention runs. Without a GPU it is taken of the budget."""
    timeout_s: float = 10.0
    """Most seconds to wait for a device before it is given up."""

    free_fields: ClassVar[tuple[str, ...]] = ("selected_tokens", "reuse_tokens", "hot_tokens")
    counters: ClassVar[tuple[str, ...]] = ("units_promoted", "units_demoted")
    """Units that became hot, and cold again."""
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("alpha", (None, 0.2, 0.15, 0.1, 0.05), "share of the context that a step selects"),
        Choice("bits", (8, 4), "bits of the keys that cold tokens are scored by"),
    )

    @override
    def __post_init__(self) -> None:
        BaselinePolicy.__post_init__(self)
        for name, value, known in (
            ("rule", self.rule, RULES), ("placement", self.placement, PLACEMENTS),
            ("bits", self.bits, (8, 4)), ("attend", self.attend, ("selected", "hot")),
        ):  # fmt: skip
            if value not in known:
                raise ConfigError(f"{name}={value} is none of {', '.join(map(str, known))}")
        if self.group_tokens != 1:
            raise ConfigError("group_tokens must be 1: tokens move between the pools one by one")
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} must be above 0 and at most 1")
        if isinstance(self.devices, str):
            split_devices(self.devices)
            if not self.device_key.startswith("file:"):
                raise ConfigError("devices=tcp://... wants device_key=file:PATH")
        elif self.device_tls:
            raise ConfigError("device_tls=... wants devices=tcp://...")
        if self.device_tls and not self.device_tls.startswith((FILE, FINGERPRINT)):
            raise ConfigError(f"device_tls={self.device_tls!r} must be file:PATH or sha256:HEX")
        if self.num_devices < 1 or self.block_tokens < 1 or self.scorer_threads < 0:
            raise ConfigError("devices and block_tokens must be at least 1, scorer_threads 0")
        if self.device_memory is not None and (not self.near or self._device_bytes < 1):
            raise ConfigError("device_memory=... wants near=true, and must be above 0")
        if not 1 <= self.copies <= min(2, self.num_devices):
            raise ConfigError(f"copies={self.copies} must be 1, or 2 with two devices or more")
        if self.host_memory is not None:
            if self.attend == "hot":
                raise ConfigError("host_memory=... wants attend=selected: the hot pool stays there")
            if self._host_bytes < 1:
                raise ConfigError(f"host_memory={self.host_memory} must be above 0")
        if self.devices != 1 and not self.near:
            raise ConfigError("devices=... wants near=true")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s} must be above 0")
        if self.hot_tokens is not None and self.hot_tokens < 2:
            raise ConfigError(f"hot_tokens={self.hot_tokens} must be at least 2")
        if self.reuse_tokens == 0:
            raise ConfigError("reuse_tokens=0 leaves no hot pool; give another policy")

    @property
    def num_devices(self) -> int:
        """Devices, wherever they are."""
        if isinstance(self.devices, str):
            return len(split_devices(self.devices))
        return self.devices

    @property
    def _device_bytes(self) -> int:
        bound = self.device_memory
        return parse_bytes(bound) if isinstance(bound, str) else bound or 0

    @property
    def _host_bytes(self) -> int:
        bound = self.host_memory
        return parse_bytes(bound) if isinstance(bound, str) else bound or 0

    def _key(self) -> bytes:
        return read_key(self.device_key, environment={}) if self.device_key else b""

    @property
    @override
    def predicts(self) -> bool:
        """Layer i+1 is evaluated while layer i computes (APP)."""
        return True

    # Memory -----------------------------------------------------------------------------------

    @override
    def plan(self, request: SizingRequest) -> tuple[SelectionPolicy, SlotPlan]:
        """Alpha is then what the plan has room for."""
        policy, plan = super().plan(request)
        if plan.is_resident or self.selected_tokens is not None or self.alpha is not None:
            return policy, plan
        alpha = min(1.0, plan.selected_units / request.max_tokens)
        return replace(self, alpha=alpha), plan

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        """There is one size."""
        return [(self, self._size(request))]

    def _size(self, request: SizingRequest) -> IndexSize:
        settings = self.score_settings(request)
        rows, tokens = settings.rows, settings.max_tokens
        held = NearIndex.num_bytes(rows, tokens) + HotCold.num_bytes(rows, tokens)
        scratch = 0
        if self.near:
            shape = request.shape
            device = DeviceSettings.of(
                settings, layers=shape.num_layers, unit_bytes=shape.token_bytes,
                stripes=Stripes(self.num_devices, copies=self.copies),
            )  # fmt: skip
            if self.copies > 1:  # what was written, and a buffer to bring devices back with
                units = device.units * self.num_devices // 2
                held += units
                scratch += max(BATCH_BYTES, 2 * shape.token_bytes) + 32 * units
            if self.device_memory is not None:
                self._check_devices(device)
            scratch += self.num_devices * device.division.num_bytes
        else:
            held += ColdKeys.num_bytes(settings)
            scratch += ColdKeys.scratch_bytes(settings)
        return IndexSize(held, scratch)

    def _check_devices(self, device: DeviceSettings) -> None:
        """Raises ConfigError where `device_memory` does not do."""
        try:
            over_tcp = isinstance(self.devices, str)
            DeviceMemory.within(device, self._device_bytes, over_tcp=over_tcp)
        except BudgetError as error:  # of other memory than what is planned here
            raise ConfigError(str(error)) from error

    @override
    def _build(
        self, request: SizingRequest, size: IndexSize, selected: int, num_slots: int, *,
        shared: bool,
    ) -> SlotPlan:  # fmt: skip
        held, scratch = size
        host_slots = self._host_slots(request)
        hot = host_slots or num_slots
        heads = request.shape.num_query_heads
        places = hot + self.window_tokens + self.sink_tokens + 2
        scratch += HotCold.scratch_bytes(request.batch, hot)
        scratch += NearIndex.scratch_bytes(request.batch, heads, places, request.max_tokens)
        scratch += request.batch * places * request.shape.dtype.itemsize  # who is attended to
        size = IndexSize(held, scratch)
        if not host_slots:
            return super()._build(request, size, selected, num_slots, shared=shared)
        plan = super()._build(request, size, selected, selected, shared=True)
        taken = host_pool_bytes(request, host_slots)
        if request.device_is_cpu:
            return replace(plan, host_slots=host_slots, pool_bytes=plan.pool_bytes + taken)
        return replace(plan, host_slots=host_slots, host_bytes=plan.host_bytes + taken)

    def _host_slots(self, request: SizingRequest) -> int:
        """Tokens of a row that `host_memory` holds, at most all of them; 0 without it."""
        if self.host_memory is None:
            return 0
        none = host_pool_bytes(request, 0)
        each = host_pool_bytes(request, 1) - none
        most = request.max_tokens
        if self.hot_tokens is not None or self.reuse_tokens is not None:
            most = min(most, max(self.hot_tokens or 0, self.reuse_tokens or 0))
        return max(0, min(most, (self._host_bytes - none) // each))

    @property
    @override
    def _sharing(self) -> tuple[bool, ...]:
        return (False,)

    @override
    def _selections(self, request: SizingRequest) -> list[int]:
        if self.selected_tokens is not None:
            counts = super()._selections(request)
        elif request.limit_bytes is None and self.alpha is None:
            counts = [request.max_tokens]
        else:
            alphas = ALPHAS if self.alpha is None else (self.alpha,)
            counts = [max(1, math.ceil(alpha * request.max_tokens)) for alpha in alphas]
        return counts if self.host_memory is None else self._in_host(request, counts)

    def _in_host(self, request: SizingRequest, counts: list[int]) -> list[int]:
        """The counts that the host's hot pool has slots for.

        Raises:
            ConfigError: there are none.
        """
        slots = self._host_slots(request)
        fitting = [count for count in counts if count <= slots]
        if not fitting and self.selected_tokens is None and self.alpha is None:
            fitting = [slots] if slots >= math.ceil(ALPHAS[-1] * request.max_tokens) else []
        if not fitting:
            raise ConfigError(
                f"host_memory={self.host_memory} makes {slots:,} hot tokens a row, and a step "
                f"selects {min(counts):,}; give {host_pool_bytes(request, min(counts)):,} bytes or "
                "more, and no hot_tokens below that"
            )
        return fitting

    @override
    def _grow(
        self, request: SizingRequest, size: IndexSize, selected: int, *, shared: bool
    ) -> SlotPlan:
        """As many slots as the budget holds: the solver may want fewer, and says so later."""
        if self.host_memory is not None:
            return self._build(request, size, selected, selected, shared=True)
        most = request.max_tokens
        if self.hot_tokens is not None or self.reuse_tokens is not None:
            most = max(selected, self.hot_tokens or 0, self.reuse_tokens or 0)
        return largest_plan(
            request, lambda slots: self._build(request, size, selected, slots, shared=shared),
            selected, min(most, ceil_div(request.max_tokens, 1)),
        )  # fmt: skip

    # Parts ------------------------------------------------------------------------------------

    def score_settings(self, request: SizingRequest | IndexRequest) -> ScoreSettings:
        """How cold tokens are scored, for one layer of this cache."""
        tokens = request.max_tokens if isinstance(request, SizingRequest) else request.max_units
        scaling = request.scaling if isinstance(request, IndexRequest) else None
        return self.settings_for(request.shape, request.batch, tokens, scaling)

    def settings_for(
        self, shape: KVShape, rows: int, max_tokens: int, scaling: float | None = None
    ) -> ScoreSettings:
        """How cold tokens of this shape are scored.

        Args:
            scaling: factor on the logits; None for 1 / sqrt(head_dim).
        """
        return ScoreSettings(
            rows=rows, max_tokens=max_tokens, query_heads=shape.num_query_heads,
            kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            dtype=KEY_DTYPES[shape.dtype],
            scaling=shape.head_dim**-0.5 if scaling is None else scaling,
            rule=self.rule, bits=self.bits, block_tokens=self.block_tokens,
            threads=self.scorer_threads,
        )  # fmt: skip

    @override
    def open_store(self, request: StoreRequest) -> KVStore:
        """Behind near-storage devices, where there are some.

        Raises:
            ConfigError: the store shall be sealed, which they cannot.
            StorageError: a device does not start.
        """
        if not self.near:
            return request.create()
        if request.sealed is True:
            raise ConfigError(
                "near-storage devices keep the cache in the open; take hillinfer with near=False, "
                "or another policy"
            )
        return NearStore.open(
            request.location,
            self.settings_for(request.shape, request.batch, request.max_tokens, request.scaling),
            layers=request.shape.num_layers, unit_bytes=request.unit_bytes,
            devices=self.devices, copies=self.copies, key=self._key(), timeout_s=self.timeout_s,
            device_memory=self._device_bytes,
            trust=Trust.of(self.device_tls) if self.device_tls else None,
        )  # fmt: skip

    @override
    def make_layers(self, builder: LayerBuilder) -> Sequence[Layer]:
        """They share a worker and a scorer."""
        setup, plan, fixed = builder.setup, builder.setup.plan, self.hot_tokens
        hot_slots = plan.host_slots or plan.num_slots
        scorer: Scorer
        if isinstance(setup.store, NearStore):
            setup.store.serve(plan.batch)
            scorer = setup.store.scorer
        else:
            fixed = fixed or hot_slots  # no device scores beside this process
            settings = self.score_settings(builder.index_request(0))
            scorer = LocalScorer(settings, builder.num_layers)
        work = NearWork(
            scorer, layers=builder.num_layers, most_hot=hot_slots,
            least_hot=plan.selected_units, fixed=fixed,
        )  # fmt: skip
        layer = HostPoolLayer if plan.host_slots else NearLayer
        return [
            layer(i, setup, builder.pool(i), self, self.make_index(builder.index_request(i)), work)
            for i in builder.numbers
        ]

    @override
    def make_index(self, request: IndexRequest) -> KeyIndex:
        return NearIndex(self.score_settings(request))

    def make_pools(self, batch: int, max_tokens: int) -> HotCold:
        """Who is demoted; in place of `make_replacement`, which knows of no tokens."""
        return HotCold(batch, max_tokens, placement=self.placement, decay_steps=self.decay_steps)

    def wanted_tokens(self, length: int, most: int) -> int:
        """Tokens that a step of a sequence of `length` tokens selects, at most `most`."""
        if self.selected_tokens is not None or self.alpha is None:
            return most
        return max(1, min(most, math.ceil(self.alpha * length)))
