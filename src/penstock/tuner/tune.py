"""tune(): settings for every batch and length from a model, a disk, a budget and some text.

Source: KVSwap (arXiv 2511.11907), section 3.5, Fig. 4 and appendix A, widened to every policy.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.core.byte_size import parse_memory
from penstock.core.errors import BudgetError, ConfigError
from penstock.devices.profile import DeviceProfile
from penstock.engine.adapter import LowRankAdapter
from penstock.methods import POLICIES
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.methods.tuned_config import TunedConfig
from penstock.models.bundled_adapter import find_adapter
from penstock.models.cache_settings import free_bytes
from penstock.models.calibrate import calibrate
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.models.weight_access import model_device
from penstock.tuner.build_tables import build_tables
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.candidates import CalibratedTables
from penstock.tuner.conditions import circumstances
from penstock.tuner.fidelity import KL_FLOOR, Reference
from penstock.tuner.journal import Journal
from penstock.tuner.kvswap_search import KVSwapSearch
from penstock.tuner.lookup_tables import LookupTables, shipped_tables
from penstock.tuner.other_policies import OtherPolicies, PolicySetting, together
from penstock.tuner.prefill_profile import PrefillProfile, PrefillWatch
from penstock.tuner.solutions import config_of
from penstock.tuner.tuning_task import (
    Say,
    TuningTask,
    device_of,
    require_sizes,
    require_tunable,
)

MOST_CONTEXT = 32768
"""That is tuned for by default."""
FORCED_TOKENS = 64
"""Decoded at the end of every calibration text."""
MOST_TEXT_TOKENS = 8192
"""Texts are read up to here: reading costs more than the square of it."""
MOST_TEXTS = 4
"""Texts that are read: pieces of the files given, or shipped documents."""
MOST_REJECTED = 8


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning made."""

    config: TunedConfig
    adapter: LowRankAdapter | None
    """Made here, since the model had none; `save` puts it beside the config."""
    tables: LookupTables
    refused: dict[str, str]
    """Policies without a solution, and why."""
    kept: Journal = field(repr=False)
    """Every measurement; its file goes when the config is saved."""

    @property
    def measured(self) -> int:
        """Runs and fidelity checks of this tuning, those of an interrupted one counted."""
        return len(self.kept.used)

    def save(self, path: str | Path) -> None:
        """Write the config, and the adapter beside it; the journal is not needed any more.

        Raises:
            StorageError: a file cannot be written.
        """
        config, target = self.config, Path(path)
        if self.adapter is not None:
            self.adapter.save(adapter_beside(target))
            config = replace(config, adapter=adapter_beside(target).name)
        config.save(target)
        self.kept.remove()


def adapter_beside(config: Path) -> Path:
    """The file of a config's own adapter."""
    return config.with_name(f"{config.stem}.adapter.safetensors")


def tune(
    model: str | Path | LoadedModel, *, max_context: int | None = None, max_batch: int = 1,
    memory: int | float | str = "1/13", disk: str | Path = "auto",
    policies: Sequence[str] = (KVSwap.name,), texts: Sequence[Path] = (),
    tables: LookupTables | str | Path | None = None, floor: float = KL_FLOOR,
    adapter: str | Path | None = None, journal: str | Path | None = None,
    progress: Say = lambda share, what: None,
) -> Tuned:  # fmt: skip
    """Find the best settings for a model on this machine.

    Args:
        model: "recall", a folder, or what `load` returned.
        max_context: most tokens of a sequence, prompt and answer (S_max); default: 32,768, or the
            model's positions where they are fewer.
        max_batch: most sequences at once (b_max).
        memory: budget for the KV of all of them: bytes, "2200MiB", a share of the full cache, or
            "auto": half of what is free when the tuning begins, at most the full cache.
        disk: where the KV will lie, as `store` of `TieredCache`: a folder, "auto", or "nvme",
            "ufs", "emmc" (simulated).
        policies: names of `POLICIES`; each gets its own solution, the fastest is the pick.
        texts: UTF-8 files of the kind that will be read; needed unless the model is the bundled
            one.
        tables: lookup tables made before (appendix A.1); None: shipped ones, or made from `texts`.
        floor: largest mean KL divergence from full attention, in nats.
        adapter: a low-rank adapter's file; None: a shipped one, or one made from `texts`.
        journal: file that keeps every measurement until the tuning is done, so that an interrupted
            one goes on where it was.
        progress: told the share done and what is going on.

    Raises:
        ConfigError: an argument makes no sense, or there is no text for this model.
        BudgetError: nothing fits the memory, or nothing that fits keeps quality; says what would.
        UnsupportedModelError: a tiered cache cannot work with the model.
        StorageError: the disk or the journal cannot be used.
    """
    require_sizes(MOST_CONTEXT if max_context is None else max_context, max_batch)
    _require_policies(policies, floor)
    loaded = model if isinstance(model, LoadedModel) else load(model)
    shape = require_tunable(loaded.model)
    max_context = _within_positions(loaded, max_context)
    require_sizes(max_context, max_batch)
    limit = parse_memory(
        memory, shape.full_cache_bytes(max_batch, max_context),
        free_bytes(model_device(loaded.model)),
    )  # fmt: skip
    pieces = calibration_tokens(
        loaded, texts, tokens=min(max_context, MOST_TEXT_TOKENS), forced=FORCED_TOKENS
    )[:MOST_TEXTS]
    kept, limit = _journal(
        journal, memory, limit, loaded, pieces, adapter=adapter, tables=tables, disk=str(disk),
        max_context=max_context, max_batch=max_batch, floor=floor,
    )  # fmt: skip
    progress = _forwards(progress)
    device = _device(str(disk), kept, progress)
    basis, own = _adapter(loaded, adapter, pieces, progress)
    known = _tables(loaded, tables, pieces, basis, progress)
    reference, prefill = _read(loaded, pieces, progress)
    names = [name for name in policies if name != KVSwap.name]
    end = 0.5 if names else 1.0
    task = TuningTask(
        loaded=loaded, adapter=basis, tables=CalibratedTables(measured=known),
        text=reference.first, prefill=prefill, store=str(disk), device=device,
        max_context=max_context, max_batch=max_batch, limit_bytes=limit, floor=floor, journal=kept,
        say=lambda share, what: progress(0.3 + (end - 0.3) * share, what),
    )  # fmt: skip
    search = search_kvswap(task, reference) if KVSwap.name in policies else None
    others, refused = _others(task, reference, names, progress)
    config = config_of(task, search, others, refused, fingerprint=fingerprint(loaded.model))
    progress(1.0, "done")
    return Tuned(config=config, adapter=own, tables=known, refused=refused, kept=kept)


def _journal(
    path: str | Path | None, memory: int | float | str, limit: int, *about: Any, **asked: Any
) -> tuple[Journal, int]:
    """The journal, and the limit: where it follows from free memory, what was free when the tuning
    began.

    Args:
        about, asked: for `circumstances`.
    """
    is_auto = isinstance(memory, str) and memory.strip().lower() == "auto"
    head = circumstances(*about, limit="auto" if is_auto else limit, **asked)
    kept = Journal(None if path is None else Path(path), head)
    if is_auto:
        limit = int(kept.measured({"run": "free memory"}, lambda: limit))
    return kept, limit


def _device(disk: str, kept: Journal, progress: Say) -> DeviceProfile:
    progress(0.0, "measuring the disk")
    return DeviceProfile(**kept.measured({"run": "disk"}, lambda: asdict(device_of(disk))))


def _forwards(progress: Say) -> Say:
    """Never tells less than before."""
    highest = 0.0

    def told(share: float, what: str) -> None:
        nonlocal highest
        highest = max(highest, share)
        progress(highest, what)

    return told


def _require_policies(policies: Sequence[str], floor: float) -> None:
    if not policies:
        raise ConfigError("give at least one policy to tune")
    for name in policies:
        POLICIES.find(name)
    if not 0 < floor < math.inf:
        raise ConfigError(f"--floor {floor} must be above 0 nats, and finite")


def _within_positions(loaded: LoadedModel, max_context: int | None) -> int:
    positions = inspect_model(loaded.model).max_positions
    if max_context is None:
        return min(MOST_CONTEXT, positions)
    if max_context > positions:
        raise ConfigError(
            f"max_context={max_context:,} is more than the {positions:,} positions of "
            f"{loaded.name}; give at most so many"
        )
    return max_context


def _adapter(
    loaded: LoadedModel, given: str | Path | None, pieces: Sequence[Tensor], progress: Say
) -> tuple[LowRankAdapter, LowRankAdapter | None]:
    """The adapter to tune with; and the same again where it was made here."""
    mark = fingerprint(loaded.model)
    if given is not None:
        shape = require_tunable(loaded.model)
        found = LowRankAdapter.load(given)
        found.check(mark, shape.num_layers, shape.joint_dim)
        return found, found
    shipped = find_adapter(mark, loaded.model.name_or_path)
    if shipped is not None:
        return shipped, None
    progress(0.02, "fitting a low-rank adapter")
    made = calibrate(loaded.model, list(pieces))
    return made, made


def _tables(
    loaded: LoadedModel, given: LookupTables | str | Path | None, pieces: Sequence[Tensor],
    adapter: LowRankAdapter, progress: Say,
) -> LookupTables:  # fmt: skip
    mark = fingerprint(loaded.model)
    if given is None:
        given = shipped_tables(mark)
    if isinstance(given, str | Path):
        given = LookupTables.load(given)
    if given is not None:
        if given.fingerprint != mark:
            raise ConfigError(
                f"the lookup tables were made for another model, {given.model}; leave them out to "
                "have them made from --text"
            )
        return given
    words = f"{len(pieces)} texts given"
    return build_tables(
        loaded, list(pieces), forced=FORCED_TOKENS, texts=words, adapter=adapter,
        progress=lambda done, total, what: progress(0.03 + 0.07 * done / total, f"tables: {what}"),
    )  # fmt: skip


def _read(
    loaded: LoadedModel, pieces: Sequence[Tensor], progress: Say
) -> tuple[Reference, PrefillProfile]:
    """Full attention over the texts, and what the first of them took."""
    total = sum(len(piece) for piece in pieces)

    def told(done: int) -> None:
        progress(0.15 + 0.15 * done / total, "reading the calibration text")

    watch = PrefillWatch(told)
    reference = Reference(loaded.model, pieces, forced=FORCED_TOKENS, progress=watch)
    return reference, watch.profile(len(pieces[0]))


def _others(
    task: TuningTask, reference: Reference, names: Sequence[str], progress: Say
) -> tuple[list[PolicySetting], dict[str, str]]:
    """Settings of the other policies, and why some have none."""
    measured = OtherPolicies(
        replace(task, say=lambda share, what: progress(0.5 + 0.5 * share, what)), reference
    )
    return together(list(measured.settings(names))), measured.refused


def search_kvswap(task: TuningTask, reference: Reference) -> KVSwapSearch:
    """KVSwap's search; picks that turn out to be too far from full attention are ruled out."""
    search = KVSwapSearch(task)
    search.spread()
    for _ in range(MOST_REJECTED):
        search.solve()
        far = [each for each in search.picks if _kl(task, reference, each) > task.floor]
        if not far:
            return search
        for policy in far:
            search.rule_out(policy)
    raise BudgetError(
        f"{MOST_REJECTED} times the fastest settings of kvswap passed the floor of {task.floor} "
        "nats when they were measured; give more memory, or a higher --floor"
    )


def _kl(task: TuningTask, reference: Reference, policy: KVSwap) -> float:
    """Measured once for each setting."""
    key = {"kl": KVSwap.name, "fields": fields_of(policy)}
    task.say(1.0, "holding the picks to full attention")
    found = task.journal.measured(
        key, lambda: reference.measure(policy, memory=None, adapter=task.adapter).kl
    )
    return float(found)
