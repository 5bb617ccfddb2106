"""A decode step on the simulated SmartSSD PC, of HillInfer and of what it compares with."""

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.methods.hillinfer.work_split import Rates, Split, solve
from research.near_storage.smartssd_machine import (
    NO_LOCALITY,
    Constants,
    Locality,
    Places,
    Workload,
    divide,
)

# A simulated decode step of full, H2O-like, prefetched, LeoAM-like --------------------------------
#
# Within a layer links work side by side and what is scored streams behind what is read, so a phase
# takes its slowest part. What a layer needs is evaluated and fetched either under the layer before
# (its query predicted, as InfiniGen, LeoAM-like and HillInfer do) or before the layer goes on
# (H2O-like, whose scores are those of its own query).

FULL, H2O, PREFETCH, LEOAM = "full", "h2o-like", "prefetch-based", "leoam-like"
BASELINES = (FULL, H2O, PREFETCH, LEOAM)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one layer needs before it can attend, in seconds."""

    seconds: float
    """All of it: one after the other, unless they overlap or a busy device takes longer."""
    scoring_s: float
    """Until all scores are there."""
    fetch_s: float
    """Until what is selected is with the GPU."""
    storage_read_bytes: float
    """That cross the link of the SSD or SmartSSD to the host."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A simulated decode step."""

    method: str
    step_s: float
    gpu_s: float
    """The GPU's own work in it."""
    scoring_s: float
    """Stall for scores."""
    fetch_s: float
    """Stall for KV."""
    layer: Evaluation
    places: Places
    beta: float | None = None
    """Hot tokens per cold one, where there is a split."""

    @property
    def stall_share(self) -> float:
        """Of the step in which the GPU waits."""
        return 1 - self.gpu_s / self.step_s


def layer_gpu_s(pc: Constants, work: Workload, attended: float, scored: float = 0.0) -> float:
    """Seconds of the GPU in one layer.

    Args:
        attended: tokens whose keys and values it reads.
        scored: tokens whose keys it reads to score them.
    """
    shape = work.shape
    elements = shape.key_elements
    flops = work.batch * shape.layer_bytes + 4 * attended * elements + 2 * scored * elements
    moved = shape.layer_bytes + attended * shape.kv_bytes + scored * shape.key_bytes
    return max(moved / pc.gpu_bandwidth, flops / pc.gpu_flops) + pc.layer_overhead_s


def compose(
    method: str, pc: Constants, work: Workload, *, gpu_s: float, layer: Evaluation, places: Places,
    overlaps: bool, beta: float | None = None,
) -> StepTime:  # fmt: skip
    """A step of layers that are all alike.

    Args:
        gpu_s: of one layer.
        overlaps: a layer's evaluation goes on under the layer before; the first one's cannot.
    """
    shape, need = work.shape, layer.seconds
    head = 2 * shape.vocabulary * shape.key_elements / pc.gpu_bandwidth
    hidden = min(need, gpu_s) if overlaps else 0.0
    stall = need + (shape.layers - 1) * (need - hidden)
    busy = shape.layers * gpu_s + head
    phases = layer.scoring_s + layer.fetch_s
    for_scores = layer.scoring_s / phases if phases else 0.0
    return StepTime(
        method=method, step_s=busy + stall, gpu_s=busy, scoring_s=stall * for_scores,
        fetch_s=stall * (1 - for_scores), layer=layer, places=places, beta=beta,
    )  # fmt: skip


def baseline_step(
    method: str, pc: Constants, work: Workload, locality: Locality = NO_LOCALITY, *,
    index_in_memory: bool = True,
) -> StepTime:  # fmt: skip
    """A step of a baseline: KV that memory cannot hold lies on the plain SSD.

    Args:
        locality: how much of the selection memory holds; the default is a pool's own share, since
            none of them places KV by what is selected. With HillInfer's they get its placement.
        index_in_memory: partial keys and abstracts may be in host memory, in the place of KV, where
            that is faster; else they lie with their tokens.

    Raises:
        ConfigError: no baseline has that name.
    """
    if method == FULL:
        return _full(pc, work)
    if method == H2O:
        return _h2o(pc, work, locality)
    if method == PREFETCH:
        index, waste = pc.partial_share * work.shape.key_bytes, 1.0
    elif method == LEOAM:
        index, waste = 2 * work.shape.key_bytes / pc.chunk_tokens, pc.chunk_waste
    else:
        raise ConfigError(f"no baseline is called {method!r}; there are {', '.join(BASELINES)}")
    found = [_indexed(method, pc, work, locality, index, waste, in_memory=False)]
    if index_in_memory and work.shape.layers * work.layer_tokens * index <= pc.host_kv_bytes:
        found.append(_indexed(method, pc, work, locality, index, waste, in_memory=True))
    return min(found, key=lambda step: step.step_s)


def _in_turn(scoring_s: float, fetch_s: float, read_bytes: float) -> Evaluation:
    return Evaluation(
        seconds=scoring_s + fetch_s, scoring_s=scoring_s, fetch_s=fetch_s,
        storage_read_bytes=read_bytes,
    )  # fmt: skip


def _full(pc: Constants, work: Workload) -> StepTime:
    """All KV to the GPU at every step, the next layer's under this layer's work (FlexGen)."""
    places, kv = divide(pc, work), work.shape.kv_bytes
    stored = places.storage * kv
    fetch = max(stored / pc.ssd_bandwidth, places.below_gpu * kv / pc.host_link)
    layer = _in_turn(0.0, fetch, stored)
    gpu = layer_gpu_s(pc, work, work.layer_tokens)
    return compose(FULL, pc, work, gpu_s=gpu, layer=layer, places=places, overlaps=True)


def _selected(places: Places, work: Workload, locality: Locality) -> tuple[float, float]:
    """Selected tokens that are below the GPU, and those of them in storage."""
    count, fast = work.alpha * places.total, places.gpu + places.host
    in_fast = count * locality.hot_share(fast / places.total)
    in_gpu = in_fast * places.gpu / fast if fast else 0.0
    return count - in_gpu, count - in_fast


def _h2o(pc: Constants, work: Workload, locality: Locality) -> StepTime:
    """Every key is scored where it lies; the SSD's are read for that, then values."""
    shape, places = work.shape, divide(pc, work)
    below, stored = _selected(places, work, locality)
    keys = places.storage * shape.key_bytes
    scoring = max(
        keys / pc.ssd_bandwidth, places.below_gpu * shape.key_bytes / pc.host_scoring
    )  # fmt: skip
    values = stored * shape.key_bytes
    fetch = max(values / pc.ssd_bandwidth, below * shape.kv_bytes / pc.host_link)
    layer = _in_turn(scoring, fetch, keys + values)
    gpu = layer_gpu_s(pc, work, work.alpha * places.total, places.gpu)
    return compose(H2O, pc, work, gpu_s=gpu, layer=layer, places=places, overlaps=False)


def _indexed(
    method: str, pc: Constants, work: Workload, locality: Locality, index_bytes: float,
    waste: float, *, in_memory: bool,
) -> StepTime:  # fmt: skip
    """Something smaller than the keys is scored by the host, and the selection prefetched.

    Args:
        index_bytes: of a token in one layer.
        waste: bytes fetched per byte selected.
        in_memory: the whole index is in host memory, in the place of KV; else it lies with its
            tokens, and the SSD's part of it is read at every step.
    """
    shape, total = work.shape, work.layer_tokens
    held = shape.layers * total * index_bytes if in_memory else 0.0
    places = divide(pc, work, host_index_bytes=held)
    below, stored = _selected(places, work, locality)
    read = 0.0 if in_memory else places.storage * index_bytes
    scoring = max(read / pc.ssd_bandwidth, places.below_gpu * index_bytes / pc.host_scoring)
    fetched = waste * stored * shape.kv_bytes
    fetch = max(fetched / pc.ssd_bandwidth, waste * below * shape.kv_bytes / pc.host_link)
    layer = _in_turn(scoring, fetch, read + fetched)
    gpu = layer_gpu_s(pc, work, work.alpha * total)
    return compose(method, pc, work, gpu_s=gpu, layer=layer, places=places, overlaps=True)


# A simulated decode step of HillInfer, its ablations and any split of its pools -------------------
#
# Cold KV lies on the SmartSSD, whose FPGA scores it as it streams from NAND; the host scores its
# own.

_ROUNDS = 20
"""At most, until a split and the skew seen under it agree."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is on, and what the device reads to score a key."""

    name: str = "hillinfer"
    bits: int = 8
    """Of a key element that the FPGA scores: 16 streams the FP16 keys (section 4.4, to the letter);
    8 and 4 are codes kept beside them, ours."""
    holds_codes: bool = True
    """The device's memory holds as many codes as fit, so that NAND is read for the rest alone."""
    places_by_hits: bool = True
    """HKM: pinning and the hit-rate table."""
    balances: bool = True
    """APP's split, Eq. 4; else as many tokens cold as hot."""
    splits_jointly: bool = False
    """The split that is best where `waits_for_all`, in the place of Eq. 4's."""
    overlaps: bool = True
    """APP's pipeline: under the layer before."""
    waits_for_all: bool = True
    """Nothing is sent before all scores are in, since the top alpha is that of both pools; Eq. 2
    does not know that."""
    writes_demoted: bool = False
    """A demotion writes its KV again, in the place of what the device has had since prefill."""


FP16 = Variant(
    name="hillinfer, FP16 keys", bits=16, holds_codes=False, writes_demoted=True
)  # fmt: skip
INT8 = Variant(name="hillinfer, INT8 codes", bits=8)
INT4 = Variant(name="hillinfer, INT4 codes", bits=4)
JOINT = Variant(name="INT8, split for one selection", splits_jointly=True)
NO_HKM = Variant(name="without HKM", places_by_hits=False)
NO_BALANCE = Variant(name="without APP's split", balances=False)
NO_APP = Variant(name="without APP", balances=False, overlaps=False)
NEITHER = Variant(
    name="without both", places_by_hits=False, balances=False, overlaps=False
)  # fmt: skip
VARIANTS = (FP16, INT8, INT4)
ABLATIONS = (NEITHER, NO_HKM, NO_APP, NO_BALANCE)


@dataclass(frozen=True, kw_only=True)
class _Selected:
    """Selected tokens of a layer by pool, and its traffic beside them."""

    gpu: float
    hot: float
    cold: float
    moved: float
    """Tokens that enter the hot pool."""


def device_scan_s(pc: Constants, work: Workload, cold: float, variant: Variant) -> float:
    """Seconds in which the device scores so many tokens of a layer."""
    elements = work.shape.key_elements
    code_bytes = cold * elements * variant.bits / 8
    held = min(code_bytes, pc.device_memory_bytes / work.shape.layers) * variant.holds_codes
    return max(
        (code_bytes - held) / pc.device_internal, code_bytes / pc.device_memory_bandwidth,
        cold * elements / pc.fpga_macs,
    )  # fmt: skip


def hillinfer_step(
    pc: Constants, work: Workload, locality: Locality, variant: Variant, *,
    hot_tokens: int | None = None,
) -> StepTime:  # fmt: skip
    """A step; the split is APP's unless `hot_tokens` of a layer's are given for the host."""
    places = divide(pc, work)
    if hot_tokens is None:
        hot_tokens = choose_split(pc, work, locality, variant).hot_tokens
    cold = places.below_gpu - hot_tokens
    placed = Places(gpu=places.gpu, host=hot_tokens, storage=cold)
    layer = _evaluation(pc, work, placed, _selection(work, placed, locality, variant), variant)
    gpu = layer_gpu_s(pc, work, work.alpha * work.layer_tokens, places.gpu)
    return compose(
        variant.name, pc, work, gpu_s=gpu, layer=layer, places=placed, overlaps=variant.overlaps,
        beta=hot_tokens / cold if cold else math.inf,
    )  # fmt: skip


def choose_split(pc: Constants, work: Workload, locality: Locality, variant: Variant) -> Split:
    """The split of what is below the GPU: Eq. 4 within the host's memory, with the skew that it
    leads to itself; as many hot as cold without APP."""
    places = divide(pc, work)
    total, most = places.below_gpu, places.host
    if not variant.balances:
        half = min(most, -(-total // 2))
        return solve(rates(pc, work, total - half, variant), work.alpha, total, half,
                     min_hot_tokens=half)  # fmt: skip
    hot = most
    for _ in range(_ROUNDS):
        placed = Places(gpu=places.gpu, host=hot, storage=total - hot)
        found = _selection(work, placed, locality, variant)
        below = found.hot + found.cold
        split = solve(
            rates(pc, work, total - hot, variant), below / total if total else 0.0, total, most,
            found.hot / below if below else 0.0, seen_hot_tokens=hot,
            selects_jointly=variant.splits_jointly,
        )  # fmt: skip
        if abs(split.hot_tokens - hot) <= 1:
            break
        hot = (hot + split.hot_tokens) // 2
    return split


def rates(pc: Constants, work: Workload, cold: float, variant: Variant) -> Rates:
    """Of both sides in tokens per second, the device's as it is with so many cold tokens."""
    shape, tokens = work.shape, max(1.0, cold)
    return Rates(
        host_scores=pc.host_scoring / shape.key_bytes,
        device_scores=tokens / device_scan_s(pc, work, tokens, variant),
        host_link=pc.host_link / shape.kv_bytes, device_link=pc.device_read / shape.kv_bytes,
    )  # fmt: skip


def _selection(
    work: Workload, placed: Places, locality: Locality, variant: Variant
) -> _Selected:  # fmt: skip
    """The GPU's tokens are hot ones like the host's, neither better nor worse."""
    total, fast = placed.total, placed.gpu + placed.host
    naive = not variant.places_by_hits
    count = work.alpha * total
    hot = min(count * locality.hot_share(fast / total, naive=naive), float(fast))
    in_gpu = hot * placed.gpu / fast if fast else 0.0
    cold = count - hot
    moved = max(cold, total * locality.moved(fast / total)) if naive else cold
    return _Selected(gpu=in_gpu, hot=hot - in_gpu, cold=cold, moved=moved * bool(placed.storage))


def _evaluation(
    pc: Constants, work: Workload, placed: Places, found: _Selected, variant: Variant
) -> Evaluation:
    """Both sides at once; the device's own work may be more than either waits for."""
    shape, kv = work.shape, work.shape.kv_bytes
    host_scoring = placed.host * shape.key_bytes / pc.host_scoring
    scan = device_scan_s(pc, work, placed.storage, variant)
    last_block = min(pc.block_tokens, placed.storage) * pc.score_bytes / pc.device_link
    host_fetch, cold_fetch = found.hot * kv / pc.host_link, found.cold * kv / pc.device_read
    through_host = (found.hot + found.cold) * kv / pc.host_link
    scoring = max(host_scoring, scan + last_block)
    fetch = max(host_fetch, cold_fetch, through_host)
    apart = max(host_scoring + host_fetch, scan + last_block + cold_fetch, through_host)
    need = scoring + fetch if variant.waits_for_all else apart
    # NAND is read for the scan, the selection and promotions; demotions go the other way beside it.
    more = (found.moved - found.cold) * kv / pc.device_read
    written = found.moved * variant.writes_demoted * kv / pc.device_write
    busy = max(scan + cold_fetch + more, written)
    return Evaluation(
        seconds=max(need, busy), scoring_s=scoring, fetch_s=fetch,
        storage_read_bytes=(
            max(found.moved, found.cold) * kv + placed.storage * pc.score_bytes
        ),
    )  # fmt: skip
