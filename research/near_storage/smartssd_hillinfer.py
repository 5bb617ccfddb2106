"""hillinfer_step(): a simulated decode step of HillInfer, its ablations and any split of its pools.

Cold KV lies on the SmartSSD, whose FPGA scores it as it streams from NAND; the host scores its own.
"""

import math
from dataclasses import dataclass

from penstock.methods.hillinfer.work_split import Rates, Split, solve
from research.near_storage.smartssd_constants import Constants
from research.near_storage.smartssd_places import Locality, Places, Workload, divide
from research.near_storage.smartssd_step import Evaluation, StepTime, compose, layer_gpu_s

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
