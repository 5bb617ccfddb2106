"""What the tuning programs share: options, model, tasks and journals, held-out documents."""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.core.byte_size import parse_memory
from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.machine import describe_libraries, describe_machine
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed, say
from penstock.evaluate.tasks.recall import make_sample
from penstock.generation.prompts import encode
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import BUNDLED, LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_adapter, random_model
from penstock.tuner import tune as tuner
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.candidates import CalibratedTables, PaperTables, Tables
from penstock.tuner.fidelity import KL_FLOOR, Reference
from penstock.tuner.journal import Journal
from penstock.tuner.kvswap_search import KVSwapSearch
from penstock.tuner.lookup_tables import shipped_tables
from penstock.tuner.prefill_profile import PrefillProfile
from penstock.tuner.tuning_task import Say, TuningTask, device_of, require_tunable
from penstock.workloads.prefilled import PrefilledText

# Options that both programs of `python -m research.tuning` have, and checks of them ---------------

REAL = "real"
"""The device that stands for this machine's own disk."""
DEVICES = (REAL, *PRESETS, "memory")
QUICK: dict[str, Any] = {
    "model": "tiny", "memory": "1/2", "devices": "memory,nvme",
}  # fmt: skip
"""A run of seconds, to see that everything works."""
DEFAULT_LAYERS = 4
PRIVATE = ("out", "json", "quick", "store")
"""Options that say nothing about what is measured, or hold a path."""


def read_tuning_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], positive: Sequence[str],
    quick: Mapping[str, Any] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """Add the options that all programs have to one's own, and read the command line.

    Args:
        positive: options whose numbers are at least 1.
        quick: defaults of the program's own options with --quick.

    Raises:
        ConfigError: a setting makes no sense.
    """
    add = parser.add_argument
    add("--model", default=BUNDLED, choices=[BUNDLED, *ARCHITECTURES],
        help="the bundled model, or an architecture with random weights")  # fmt: skip
    add("--layers", type=int, help=f"of an architecture (default: {DEFAULT_LAYERS})")
    add("--memory", default="1/6", help="fast memory for KV: 1/6 of the full cache, 12MiB, ...")
    add("--devices", default="real,nvme,emmc", help="of " + ",".join(DEVICES))
    add("--store", default="auto", metavar="FOLDER", help="where the device `real` has its files")
    add("--floor", type=float, default=KL_FLOOR, help="most KL from full attention, in nats")
    add("--quick", action="store_true", help="a tiny model and few settings, in seconds")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK, **(quick or {}))
    out = "the result; beside it a journal for each device, with which an interrupted run goes on"
    args = read_options(parser, arguments, resume=False, minutes=False, out=out)
    devices = list(dict.fromkeys(args.devices.split(",")))
    for name in devices:
        if name not in DEVICES:
            raise ConfigError(f"--devices: {name!r} is none of {', '.join(DEVICES)}")
    args.devices = devices
    if args.model == BUNDLED and args.layers is not None:
        raise ConfigError(f"--layers is for architectures; {BUNDLED} has its own")
    if args.model != BUNDLED:
        most = int(ARCHITECTURES[args.model](1).num_hidden_layers)
        args.layers = min(DEFAULT_LAYERS, most) if args.layers is None else args.layers
        if not 2 <= args.layers <= most:
            raise ConfigError(f"--layers {args.layers} must be 2 (to predict) to {most}")
    if args.floor <= 0:
        raise ConfigError(f"--floor {args.floor} must be above 0")
    for name in positive:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    return args


class Bench(Protocol):
    """What a program measures."""

    def run(self) -> None:
        """Measure; the result has what is finished."""

    def forget(self) -> None:
        """Remove the journals, with which an interrupted run goes on: all is in the result."""


def run_bench(
    kind: str, make: Callable[[argparse.Namespace, Result], Bench],
    table: Callable[[dict[str, Any]], str], arguments: Sequence[str], args: argparse.Namespace,
) -> Result:  # fmt: skip
    """Measure everything that the command line asks for, print it and save it.

    Args:
        kind: of the result.
        make: loads the model.
        table: of the figures.

    Raises:
        PenstockError: bad input, or a device failed.
    """
    settings: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in PRIVATE}
    result = Result.begin(
        kind, arguments, settings, seed=args.seed, store=args.store, package="research"
    )
    bench = make(args, result)
    bench.run()
    if args.out:
        result.save(args.out)
        bench.forget()
    return closed(result, args, table(result.figures))


# The model and everything around it that `penstock tune` is given, device by device ---------------

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
            # Nothing here asks how long prompts take.
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


# Held-out documents -------------------------------------------------------------------------------

TASKS = ("copy", "pointer_chasing", "two_walkers")
"""Their answers are long; a document of each in turn. Bad settings lose copies first."""
_MOST_DRAWN = 50


def held_out_texts(
    loaded: LoadedModel, *, tokens: int, forced: int, count: int, seed: int
) -> list[Tensor]:
    """Documents with a question and the beginning of its true answer, for the bundled model.

    Calibration texts come from a seed of their own, which is none of these.

    Args:
        tokens: most of a text, answer included.
        forced: tokens of the answer that are kept, one word each.

    Returns:
        int64. [count][tokens]

    Raises:
        ConfigError: `tokens` is too short for a task, or its answers for `forced`.
    """
    assert loaded.tokenizer is not None
    vocabulary = loaded.tokenizer.get_vocab()
    texts = []
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        rng = random.Random(f"penstock bench tune/{seed}/{number}")
        texts.append(torch.tensor(encode(loaded, _text(task, tokens, forced, rng, vocabulary))))
    return texts


def _text(
    task: str, tokens: int, forced: int, rng: random.Random, vocabulary: dict[str, int]
) -> str:
    for _ in range(_MOST_DRAWN):
        sample = make_sample(task, tokens - forced, rng, vocabulary)
        answer = sample.answer.split()
        if len(answer) >= forced:
            return " ".join([sample.prompt, *answer[:forced]])
    raise ConfigError(
        f"answers of {task} at {tokens:,} tokens have fewer than {forced}; give a smaller --forced"
    )


class HeldOutQuality:
    """Settings held to full attention on held-out documents, each once, whatever the device."""

    def __init__(
        self, loaded: LoadedModel, adapter: LowRankAdapter, texts: Sequence[Tensor], *,
        forced: int, journal: Journal,
    ) -> None:  # fmt: skip
        """
        Args:
            texts: of `held_out_texts`; read when something is to be measured.
            forced: tokens at the end of each that are decoded under a setting.
            journal: of nothing else.
        """
        self._loaded, self._adapter, self._texts = loaded, adapter, texts
        self._forced, self.journal = forced, journal
        self._about = {"forced": forced, "texts": [len(text) for text in texts]}
        self._reference: Reference | None = None
        self.found: dict[str, dict[str, float]] = {}
        """KL, its 90th percentile and agreement, by `quality_key`."""

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self._texts)

    def measure(self, policies: Sequence[KVSwap]) -> None:
        """Add settings, with all choices made, to `found`; known ones are not run again."""
        wanted = {quality_key(fields_of(each)): each for each in policies}
        todo = [key for key in wanted if not self.journal.knows(self._key(key))]
        progress = Progress(len(wanted))
        progress.skip(len(wanted) - len(todo))
        for key in todo:
            if self._reference is None:
                say("full attention over the held-out text")
                model = self._loaded.model
                self._reference = Reference(model, self._texts, forced=self._forced)
            progress.say("quality on held-out text")
            found = self._reference.measure(wanted[key], memory=None, adapter=self._adapter)
            values = {"kl": found.kl, "kl_p90": found.kl_p90, "agreement": found.agreement}
            self.journal.note(self._key(key), values)
            progress.step(1)
        self.found |= {key: self.journal.recall(self._key(key)) for key in wanted}

    def _key(self, setting: str) -> dict[str, Any]:
        return {**self._about, "setting": setting}

    def summary(self, floor: float) -> dict[str, Any]:
        """What was measured on what, for a result."""
        return {
            "guard": "KL from full attention on held-out documents, mean in nats",
            **self._about, "settings": len(self.found),
            "within_floor": sum(each["kl"] <= floor for each in self.found.values()),
        }  # fmt: skip


def quality_key(fields: dict[str, Any]) -> str:
    """A setting's fields as one text."""
    return json.dumps(fields, sort_keys=True)
