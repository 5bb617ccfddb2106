"""`python -m research.settings`: throughput in settings A and B of the KVSwap paper.

Source: KVSwap (arXiv 2511.11907), sections 4.3, 5.2 (Table 4), 5.4 (Fig. 11) and 6 (Fig. 13a).

The plans (which rank, how many slots, which batch) are made for the whole model. Where that is too
slow, the first few of its layers are decoded, and the time of a step is put together from the
first layer, the inner ones, the last one and the rest (embedding and head), as the paper's own
profiler measures one layer.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, result_file
from penstock.evaluate.resuming import check_same
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.methods import KVSwap
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_adapter, random_model
from penstock.models.prefetch_hooks import predictor_bytes
from penstock.workloads.selection_streams import PAPER_OVERLAP
from research.settings.cases import Floor, Measurement, measure_case
from research.settings.methods import (
    BATCHES,
    METHODS,
    Case,
    Machine,
    cases_of_a,
    cases_of_b,
)
from research.settings.table import ratios_of, ratios_text, settings_table

TOTALS, SHARES = "2000MiB,800MiB", "1/13,1/34"
_SAME_WHEN_RESUMED = (
    "setting", "config", "on", "overlap", "memory", "layers", "steps", "step_seconds",
)  # fmt: skip
_GROWING = ("contexts", "batches", "totals", "shares", "devices")
LEAST_LAYERS = 4
"""First, two inner ones, last."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.settings", description=__doc__)
    add = parser.add_argument
    add("--setting", required=True, choices=["A", "B"], help="equal share each, or equal total")
    add("--config", default="llama-3.1-8b", choices=list(ARCHITECTURES))
    add("--layers", type=int, help="layers to measure (default: 4 on cpu, all on cuda)")
    add("--contexts", default="16384,32768")
    add("--batches", default=",".join(map(str, BATCHES)), help="of setting A")
    add("--memory", default="1/13", help="setting A: share of the full cache")
    add("--totals", default=TOTALS, help="setting B: KV memory of all sequences together")
    add("--shares", default=SHARES, help="setting B: KVSwap's share per sequence at each total")
    add("--devices", default="nvme,emmc", help=f"simulated: {', '.join(PRESETS)}")
    add("--methods", default=",".join(METHODS))
    add("--overlap", type=float, default=PAPER_OVERLAP, help="of selections from step to step")
    add("--steps", type=int, default=6, help="measured steps on each device")
    add("--step-seconds", type=float, default=12.0, help="steps that would be longer are not run")
    add("--on", default="cpu", choices=["cpu", "cuda"])
    add("--minutes", type=float, help="stop cleanly when this much time has passed")
    add("--seed", type=int, default=0)
    add(
        "--out",
        type=result_file,
        help="file for the result (benchmarks/results/NAME.json), saved as it grows",
    )
    add("--resume", action="store_true", help="go on with the result in --out")
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    for device in args.devices.split(","):
        if device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {', '.join(PRESETS)}")
    whole_numbers(args.contexts, "--contexts")
    whole_numbers(args.batches, "--batches")
    if args.steps < 1:
        raise ConfigError("--steps must be at least 1")
    return args


class SettingBenchmark:
    """All cases of one run, their rows, and the floors of their batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Build the model and plan every case.

        Raises:
            ConfigError: a method does not exist, or too few layers were asked for.
        """
        self._args = args
        contexts, devices = whole_numbers(args.contexts, "--contexts"), args.devices.split(",")
        methods = [setting.text for setting in parse_settings([args.methods])]
        new_tokens = (args.steps + 2) * len(devices) + 4
        whole = ARCHITECTURES[args.config](max(contexts) + new_tokens)
        self.of_layers = int(whole.num_hidden_layers)
        default = self.of_layers if args.on == "cuda" else min(LEAST_LAYERS, self.of_layers)
        self.layers = args.layers or default
        if not min(LEAST_LAYERS, self.of_layers) <= self.layers <= self.of_layers:
            raise ConfigError(
                f"--layers must be {min(LEAST_LAYERS, self.of_layers)} to {self.of_layers}"
            )
        say(f"building {self.layers} of {self.of_layers} layers of {args.config}")
        model = random_model(
            args.config, max_positions=max(contexts) + new_tokens, seed=args.seed, device=args.on,
            layers=self.layers,
        )  # fmt: skip
        shape = inspect_model(model)
        copies = predictor_bytes(model, shape, KVSwap(), frozenset())
        self.machine = Machine(
            shape=shape.kv.of_layers(self.of_layers), device_is_cpu=args.on == "cpu",
            predictor_bytes=copies * (self.of_layers - 1) // (self.layers - 1),
            new_tokens=new_tokens,
        )  # fmt: skip
        self.bench = Measurement(
            model=model, adapter=random_adapter(model, args.seed), of_layers=self.of_layers,
            machine=self.machine, overlap=args.overlap, steps=args.steps,
            most_s=args.step_seconds, seed=args.seed,
        )  # fmt: skip
        if args.setting == "A":
            batches = whole_numbers(args.batches, "--batches")
            self.cases = cases_of_a(methods, devices, contexts, batches, args.memory, self.machine)
        else:
            self.cases = cases_of_b(
                methods, devices, contexts, args.totals.split(","), args.shares.split(","),
                self.machine,
            )  # fmt: skip
        # One document of a batch serves all of its cases.
        self.cases.sort(key=lambda case: (case.context, case.batch))
        self.rows: list[dict[str, Any]] = []
        self._sitting = 1

    def take_up(self, former: Result, settings: dict[str, Any]) -> None:
        """Keep what an interrupted run has measured.

        Args:
            settings: of the result; what the earlier run was asked for is added.

        Raises:
            ConfigError: that run asked for something else.
        """
        check_same(former.settings, settings, _SAME_WHEN_RESUMED)
        for name in _GROWING:
            texts = former.settings[name].split(","), settings[name].split(",")
            settings[name] = ",".join(dict.fromkeys(word for words in texts for word in words))
        asked = parse_settings([former.settings["methods"], settings["methods"]])
        settings["methods"] = ",".join(method.text for method in asked)
        self.rows = list(former.figures["rows"])
        self._sitting = 1 + max((row.get("sitting", 0) for row in self.rows), default=0)

    def run(self, keep: Any) -> None:
        """Measure what is left."""
        began = time.perf_counter()
        left = [case for case in self.cases if not self._is_done(case)]
        progress = Progress(progress_of(self.cases))
        progress.skip(progress_of(self.cases) - progress_of(left))
        floor: Floor | None = None
        for case in left:
            minutes = (time.perf_counter() - began) / 60
            if self._args.minutes is not None and minutes > self._args.minutes:
                say(f"time is up after {minutes:.1f} minutes")
                break
            progress.say(f"{case.method}, {case.context} tokens, batch {case.batch}")
            if floor is None or floor.batch != case.batch:
                if floor is not None:
                    floor.close()
                floor = Floor(self.bench, case.batch)
            rows = measure_case(self.bench, case, floor)
            self.rows += [{**row, "sitting": self._sitting} for row in rows]
            progress.step(_weight(case))
            keep()
        if floor is not None:
            floor.close()

    def _is_done(self, case: Case) -> bool:
        wanted = {(case.method, case.context, case.budget, d) for d in case.devices}
        if self._args.setting == "A":
            rows = [row for row in self.rows if row["batch"] == case.batch]
        else:
            rows = self.rows
        return wanted <= {
            (row["method"], row["context"], row["budget"], row["device"]) for row in rows
        }


def _weight(case: Case) -> int:
    return case.context * case.batch // 1024 + 4


def progress_of(cases: Sequence[Case]) -> int:
    """Work in these cases, in the units of the progress lines."""
    return sum(_weight(case) for case in cases)


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    benchmark = SettingBenchmark(args)
    private = ("out", "json", "resume", "minutes")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings.update(layers=benchmark.layers, of_layers=benchmark.of_layers)
    result = Result.begin("setting", arguments, settings, seed=args.seed, package="research")
    result.command = result.command.replace("research.setting ", "research.settings ")
    if args.on == "cuda":
        result.machine["gpu"] = torch.cuda.get_device_name()
    sitting = Sitting(result, args)
    if sitting.former is not None:
        benchmark.take_up(sitting.former, result.settings)

    def keep() -> None:
        ratios = ratios_of(benchmark.rows, same_batch=args.setting == "A")
        sitting.keep({"rows": benchmark.rows, "ratios": ratios})

    try:
        benchmark.run(keep)
    finally:
        keep()
    print(settings_table(benchmark.rows))
    print(ratios_text(result.figures["ratios"]))
    return closed(result, args)
