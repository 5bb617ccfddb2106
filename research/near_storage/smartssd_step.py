"""StepTime and baseline_step(): a simulated decode step of full, H2O-like, prefetched, LeoAM-like.

Within a layer links work side by side and what is scored streams behind what is read, so a phase
takes its slowest part. What a layer needs is evaluated and fetched either under the layer before
(its query predicted, as InfiniGen, LeoAM-like and HillInfer do) or before the layer goes on
(H2O-like, whose scores are those of its own query).
"""

from dataclasses import dataclass

from penstock.core.errors import ConfigError
from research.near_storage.smartssd_constants import Constants
from research.near_storage.smartssd_places import NO_LOCALITY, Locality, Places, Workload, divide

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
    """Every key is scored, by whoever is above it; the SSD's are read for that, then values."""
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
