"""Workbench: the model and everything around it that `penstock tune` is given, device by device."""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.byte_size import parse_memory
from penstock.core.errors import ConfigError
from penstock.devices.profile import DeviceProfile
from penstock.evaluate.machine import describe_libraries, describe_machine
from penstock.evaluate.progress import Progress
from penstock.evaluate.sitting import say
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import BUNDLED, LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter, random_model
from penstock.tuner import tune as tuner
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.candidates import CalibratedTables, PaperTables, Tables
from penstock.tuner.fidelity import Reference
from penstock.tuner.journal import Journal
from penstock.tuner.kvswap_search import KVSwapSearch
from penstock.tuner.lookup_tables import shipped_tables
from penstock.tuner.prefill_profile import PrefillProfile
from penstock.tuner.tuning_task import Say, TuningTask, device_of, require_tunable
from penstock.workloads.prefilled import PrefilledText
from research.tuning.options import REAL

CHUNK_TOKENS = 1024
"""Of a forward pass over the text."""
_SAY_EVERY_S = 5.0


@dataclass(kw_only=True)
class GridTask(TuningTask):
    """A tuning task whose (b, S) are given, where `TuningTask` halves the largest ones."""

    given_batches: Sequence[int]
    given_contexts: Sequence[int]

    @property
    def batches(self) -> list[int]:
        """b of the grid, ascending."""
        return sorted(self.given_batches)

    @property
    def contexts(self) -> list[int]:
        """S of the grid, ascending."""
        return sorted(self.given_contexts)


class Workbench:
    """Made once for all devices of a run."""

    def __init__(
        self, args: argparse.Namespace, *, kind: str, batches: Sequence[int],
        contexts: Sequence[int],
    ) -> None:  # fmt: skip
        """Load or build the model, and read the text that it is measured on.

        Args:
            args: see `options.add_options`.
            kind: of the result.
            batches, contexts: the grid to tune for; --memory is for the largest of both.

        Raises:
            ConfigError: a size makes no sense, or the bundled model has no lookup tables.
        """
        self._args, self._kind = args, kind
        self._journals: list[Journal] = []
        self._batches, self._contexts = list(batches), list(contexts)
        longest = max(contexts)
        self.is_random = args.model != BUNDLED
        if self.is_random:
            model = random_model(
                args.model, max_positions=longest, seed=args.seed, layers=args.layers
            )
            self.loaded = LoadedModel(model=model, tokenizer=None, name=args.model)
            self.adapter = random_adapter(model, args.seed)
        else:
            self.loaded = load(args.model)
            found = find_adapter(fingerprint(self.loaded.model))
            assert found is not None, "the bundled model comes with its adapter"
            self.adapter = found
        require_tunable(self.loaded.model)
        shape = inspect_model(self.loaded.model)
        if longest > shape.max_positions:
            raise ConfigError(
                f"{args.model} has {shape.max_positions:,} positions; {longest:,} are asked for"
            )
        self.limit_bytes = parse_memory(
            args.memory, shape.kv.full_cache_bytes(max(batches), longest), 0
        )
        self.tables = self._tables(shape.kv.joint_dim)
        self._text = None if self.is_random else self._read(longest)

    def _tables(self, joint_dim: int) -> Tables:
        if self.is_random:
            return PaperTables(joint_dim=joint_dim)
        found = shipped_tables(fingerprint(self.loaded.model))
        if found is None:
            raise ConfigError(f"no lookup tables of {self.loaded.name} come with this package")
        return CalibratedTables(measured=found)

    def _read(self, tokens: int) -> PrefilledText:
        """The longest calibration text that fits, whole: the largest S has a real past too."""
        texts = calibration_tokens(self.loaded, [], tokens=tokens, forced=1)
        ids = max(texts, key=len)[None]
        progress, done = Progress(ids.shape[1]), 0

        def tell(tokens_read: int) -> None:
            nonlocal done
            progress.step(tokens_read - done)
            done = tokens_read
            progress.say("reading the text that is decoded behind")

        return PrefilledText(self.loaded.model, ids, chunk=CHUNK_TOKENS, progress=tell)

    @cached_property
    def reference(self) -> Reference:
        """Full attention on calibration texts, as `penstock tune` holds its picks to it."""
        assert not self.is_random, "random weights have no quality"
        pieces = calibration_tokens(
            self.loaded, [], tokens=min(max(self._contexts), tuner.MOST_TEXT_TOKENS),
            forced=tuner.FORCED_TOKENS,
        )  # fmt: skip
        say("full attention over the calibration text")
        held = pieces[: tuner.MOST_TEXTS]
        return Reference(self.loaded.model, held, forced=tuner.FORCED_TOKENS)

    def search(self, task: TuningTask) -> KVSwapSearch:
        """The search of `penstock tune`, over; picks of stored models are held to full attention.

        Raises:
            BudgetError: nothing fits, or nothing that fits keeps quality.
            StorageError: the device failed, or the journal cannot be written.
        """
        if not self.is_random:
            return tuner.search_kvswap(task, self.reference)
        search = KVSwapSearch(task)
        search.spread()
        search.solve()
        return search

    # What a device is measured with -----------------------------------------------------------

    def journal(self, name: str) -> Journal:
        """Measurements of one device, or of something else, that outlive an interrupted run.

        Raises:
            StorageError: it cannot be written.
        """
        args = self._args
        machine = {k: v for k, v in describe_machine().items() if k not in ("threads", "disk")}
        about: Mapping[str, Any] = {
            "program": self._kind, "of": name, "model": args.model, "layers": args.layers,
            "limit_bytes": self.limit_bytes, "batches": self._batches,
            "contexts": self._contexts, "floor": args.floor, "seed": args.seed,
            "store": args.store if name == REAL else None, "machine": machine,
            "libraries": describe_libraries(),
        }  # fmt: skip
        out = Path(args.out) if args.out else None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
        path = None if out is None else out.with_name(f"{out.name}.{name}.journal")
        self._journals.append(Journal(path, about))
        return self._journals[-1]

    def forget(self) -> None:
        """Remove all journals: what they hold is in the result."""
        for journal in self._journals:
            journal.remove()

    def task(self, device: str) -> GridTask:
        """What `penstock tune` would measure with.

        Raises:
            StorageError: the device or the journal cannot be used.
        """
        journal = self.journal(device)
        store = self._args.store if device == REAL else device
        profile = DeviceProfile(
            **journal.measured({"run": "device"}, lambda: asdict(device_of(store)))
        )
        return GridTask(
            loaded=self.loaded, adapter=self.adapter, tables=self.tables, text=self._text,
            # How long prompts take is nobody's question here.
            prefill=PrefillProfile(0.0, 0.0),
            store=store, device=profile, max_context=max(self._contexts),
            max_batch=max(self._batches), limit_bytes=self.limit_bytes, floor=self._args.floor,
            journal=journal, say=_teller(device), given_batches=self._batches,
            given_contexts=self._contexts,
        )  # fmt: skip


def _teller(device: str) -> Say:
    """Says on stderr what a tuner does to a device: what is new at once, else now and then."""
    last, told_s = "", -math.inf

    def tell(share: float, what: str) -> None:
        nonlocal last, told_s
        if what != last or time.perf_counter() - told_s > _SAY_EVERY_S:
            last, told_s = what, time.perf_counter()
            say(f"{device}: {share:4.0%}  {what}")

    return tell
