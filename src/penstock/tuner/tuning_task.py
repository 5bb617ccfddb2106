"""TuningTask: what is to be tuned for, and everything that measurements share."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil
import torch

from penstock.core.errors import ConfigError, UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.devices.measure import fit_profile as fit_device
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.engine.adapter import LowRankAdapter
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.cache_settings import true_query_layers
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.prefetch_hooks import predictor_bytes
from penstock.models.weight_access import model_device
from penstock.storage.measured_directory import measure_directory
from penstock.storage.open_files import find_directory
from penstock.storage.store import KVStore, parse_location
from penstock.tuner.candidates import Seat, Tables
from penstock.tuner.engine_run import ANSWER_TOKENS, Document, Workpiece
from penstock.tuner.fetch_survey import Fetches, FetchSetting, survey
from penstock.tuner.journal import Journal
from penstock.tuner.prefill_profile import PrefillProfile
from penstock.tuner.text_document import TextDocument
from penstock.workloads.prefilled import PrefilledText
from penstock.workloads.selection_streams import OverlapStream
from penstock.workloads.synthetic_kv import SyntheticKV

MOST_MEASURED_BYTES = 128 << 20
MOST_BATCHES = 8
_SHORTFALL = 0.05
"""A text may be so much shorter than the past that it stands for."""
SHORTEST_CONTEXT = 4096
"""S_min of appendix A.3."""
Say = Callable[[float, str], None]
"""Told the share done in [0, 1] and what is going on."""


def grid(largest: int, smallest: int) -> list[int]:
    """`largest` and every halving of it down to `smallest`, ascending: 4096, 8192, ..."""
    out = [largest]
    while out[-1] // 2 >= smallest:
        out.append(out[-1] // 2)
    return out[::-1]


@dataclass(kw_only=True)
class TuningTask:
    """Made by `tune`; measurements of all policies go through it."""

    loaded: LoadedModel
    adapter: LowRankAdapter | None
    tables: Tables
    text: PrefilledText | None
    """Of one sequence; None: noise stands for every past."""
    prefill: PrefillProfile
    store: str
    device: DeviceProfile
    max_context: int
    max_batch: int
    limit_bytes: int
    """For `max_batch` sequences."""
    floor: float
    journal: Journal
    say: Say = field(default=lambda share, what: None)
    pace_s: float = 0.0
    """`Pace` at which everything is told, once enough was measured to say; 0: not yet."""

    @property
    def model(self) -> CausalLM:
        """The model."""
        return self.loaded.model

    @property
    def contexts(self) -> list[int]:
        """S of the grid (appendix A.3): halvings of the largest; the paper has steps of 2K."""
        return grid(self.max_context, min(SHORTEST_CONTEXT, self.max_context))

    @property
    def batches(self) -> list[int]:
        """b of the grid: in steps of 1 as in the paper, of doublings where that would be many."""
        if self.max_batch <= MOST_BATCHES:
            return list(range(1, self.max_batch + 1))
        return grid(self.max_batch, 1)

    @property
    def corners(self) -> list[tuple[int, int]]:
        """(b, S) at the grid's ends, where settings are measured."""
        batches = sorted({self.batches[0], self.batches[-1]})
        contexts = sorted({self.contexts[0], self.contexts[-1]})
        return [(batch, context) for batch in batches for context in contexts]

    def limit_for(self, batch: int) -> int:
        """Budget of so many sequences: B_max / b_max each (appendix A.4)."""
        return self.limit_bytes * batch // self.max_batch

    def seat(self, policy: KVSwap) -> Seat:
        """What plans depend on."""
        shape = inspect_model(self.model)
        late = true_query_layers(policy, self.adapter)
        return Seat(
            shape=shape.kv, sector_bytes=_sector_bytes(self.store, shape.kv.num_layers),
            device_is_cpu=model_device(self.model).type == "cpu",
            has_adapter=self.adapter is not None,
            most_rank=shape.kv.joint_dim if self.adapter is None else self.adapter.rank,
            widest_ranks=() if self.adapter is None else self.adapter.widest_ranks(),
            true_query_layers=late,
            predictor_bytes=predictor_bytes(self.model, shape, policy, late),
        )  # fmt: skip

    def workpiece(self, batch: int, context: int, new_tokens: int = ANSWER_TOKENS) -> Workpiece:
        """A past of so many tokens for so many sequences; the answer's room is part of `context`.

        A real text where it is long enough, noise otherwise.
        """
        past = context - new_tokens
        document: Document
        if self.has_text(past):
            assert self.text is not None
            document = TextDocument(self.text, batch)
            past = min(past, self.text.length)
        else:
            device = model_device(self.model)
            document = SyntheticKV(inspect_model(self.model).kv, batch, device)
        return Workpiece(
            model=self.model, adapter=self.adapter, document=document, batch=batch, context=past,
            new_tokens=context - past, stream=self._stream(document),
        )  # fmt: skip

    def fetches(
        self, context: int, choices: Sequence[FetchSetting], *, rank: int
    ) -> dict[FetchSetting, Fetches] | None:
        """What choices fetch behind the text, once for each length; None without a text of it.

        Args:
            context: tokens of a sequence, its answer included.
            rank: of the index that looks.
        """
        work = self.workpiece(1, context)
        if work.stream is not None:
            return None
        # A simulated device would only make it slow.
        name, _, folder = self.store.partition(":")
        store = (folder or "memory") if name in PRESETS else self.store
        counts = self.journal.measured(
            {"run": "fetches", "context": context, "rank": rank, "choices": choices},
            lambda: list(survey(work, choices, rank=rank, store=store).values()),
        )
        return {
            choice: Fetches(*count) for choice, count in zip(choices, counts, strict=True)
        }  # fmt: skip

    def most_open(self, batch: int, context: int) -> int:
        """Caches of this size that half of the free memory and disk hold together; at least 1."""
        whole = inspect_model(self.model).kv.full_cache_bytes(batch, context)
        _, place = parse_location(self.store)
        each = self.limit_for(batch) + (whole if place == "memory" else 0)
        fitting = int(psutil.virtual_memory().available) // 2 // each
        if place != "memory":
            free = shutil.disk_usage(find_directory(place)).free
            fitting = min(fitting, free // 2 // whole)
        return max(1, fitting)

    def has_text(self, tokens: int) -> bool:
        """Whether a real text is long enough, or nearly."""
        return self.text is not None and (1 - _SHORTFALL) * tokens <= self.text.length

    def _stream(self, document: Document) -> OverlapStream | None:
        """Where selections come from: noise has no locality, so that the tables' is laid over."""
        if isinstance(document, TextDocument):
            return None
        return OverlapStream(overlap=self.tables.reuse_rate(4, 400, 400))


def device_of(store: str) -> DeviceProfile:
    """The disk's profile: a preset, or measured (a few seconds, once).

    Raises:
        ConfigError: it is no directory.
        StorageError: the directory cannot be used.
    """
    name = store.split(":", 1)[0]
    if name in PRESETS:
        return PRESETS[name]
    if store == "memory":
        return DeviceProfile(
            name="memory", title="memory", bandwidth=1e12, write_bandwidth=1e12, iops=1e9,
            latency_s=0.0, flash_page_bytes=1,
        )  # fmt: skip
    measured = measure_directory(store, file_bytes=MOST_MEASURED_BYTES, seconds_per_cell=0.1)
    fitted = fit_device(measured.cells, name="real", sector_bytes=measured.sector_bytes)
    return replace(fitted, title="this disk", write_bandwidth=measured.write_bandwidth)


def _sector_bytes(store: str, num_layers: int) -> int:
    with KVStore.create(store, num_layers=num_layers, unit_bytes=512) as opened:
        return int(opened.region(0).file.sector_bytes)


def require_tunable(model: CausalLM) -> KVShape:
    """The shape of a model whose documents can be put together from parts.

    Raises:
        UnsupportedModelError: some of its layers have a sliding window, or a recurrent state.
    """
    shape = inspect_model(model)
    if shape.states:
        raise UnsupportedModelError(
            "penstock tune puts documents together from parts, and a recurrent state stands for "
            "one text; run hybrid models with --policy kvswap and its defaults"
        )
    if len(shape.tiered_layers) != len(shape.layer_types):
        raise UnsupportedModelError(
            "penstock tune cannot tune models with sliding-window layers yet; run them with "
            "--policy kvswap and its defaults"
        )
    return shape.kv


def require_sizes(max_context: int, max_batch: int) -> None:
    """Refuse sizes that make no sense.

    Raises:
        ConfigError: with what would.
    """
    if max_context < 1024 or max_batch < 1:
        raise ConfigError(
            f"--max-context {max_context} must be at least 1024 tokens and --max-batch {max_batch} "
            "at least 1"
        )


def choice_of_points(features: Sequence[Sequence[float]], count: int) -> list[int]:
    """Points that lie far apart: the first, then always the one farthest from all taken.

    Args:
        features: comparable numbers of every point. [points][features]
    """
    points = torch.tensor(features, dtype=torch.float64)
    spread = (points.amax(0) - points.amin(0)).clamp_min(1e-9)
    points = points / spread
    taken = [0]
    nearest = (points - points[0]).abs().sum(1)
    nearest[0] = -1.0
    while len(taken) < min(count, len(points)):
        best = int(nearest.argmax())
        taken.append(best)
        nearest = torch.minimum(nearest, (points - points[best]).abs().sum(1))
        nearest[best] = -1.0
    return taken
