"""`python -m research.settings`: throughput in settings A and B of the KVSwap paper.

Source: KVSwap (arXiv 2511.11907), sections 4.3, 5.2 (Table 4), 5.4 (Fig. 11) and 6 (Fig. 13a).

The plans (which rank, how many slots, which batch) are made for the whole model. Where that is too
slow, the first few of its layers are decoded, and the time of a step is put together from the
first layer, the inner ones, the last one and the rest (embedding and head), as the paper's own
profiler measures one layer.
"""

import argparse
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from typing_extensions import override

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import Row
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.evaluate.text_table import format_table
from penstock.methods import KVSwap
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_adapter, random_model
from penstock.models.prefetch_hooks import predictor_bytes
from penstock.workloads.selection_streams import PAPER_OVERLAP
from research.grid import Grid
from research.settings.cases import (
    BATCHES,
    METHODS,
    PAPER_BASELINES,
    UNLIMITED,
    Case,
    Floor,
    Machine,
    Measurement,
    cases_of_a,
    cases_of_b,
    is_kvswap,
    measure_case,
)

# Tables of settings A and B, and KVSwap's ratio to the best method beside it ----------------------

RATE = "whole_model_tokens_per_s"


def settings_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each case and device, device by device."""
    header = [
        "method", "device (simulated)", "context", "batch", "memory", "tokens/s", "step ms",
        "floor", "predicted", "stall", "hits", "reads/token", "KB/token",
    ]  # fmt: skip
    lines = []
    for row in sorted(rows, key=lambda r: (r["device"], r["context"], r["budget"], r["batch"])):
        line = [row["method"], row["device"], str(row["context"]), str(row["batch"])]
        line.append(format_bytes(row["ledger_bytes"]) if row.get("ledger_bytes") else "")
        if row.get(RATE) is None:
            lines.append([*line, row["skipped"] or "not measured"])
            continue
        line += [f"{row[RATE]:.2f}", f"{row['whole_ms']:.0f}"]
        if row.get("predicted_ms") is not None:
            line += [
                f"{row['floor_ms']:.0f}", f"{row['predicted_ms']:.0f}", f"{row['stall_share']:.0%}",
                "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
                f"{row['reads_per_token']:.0f}", f"{row['read_bytes_per_token'] / 1e3:.0f}",
            ]  # fmt: skip
        lines.append(line)
    return format_table(header, lines)


def ratios_of(rows: Sequence[dict[str, Any]], *, same_batch: bool) -> list[dict[str, Any]]:
    """KVSwap's tokens/s over the best retrieval baseline's, case by case.

    Setting A compares rows of one context and batch (`same_batch`), setting B of one context and
    total budget.
    A baseline that was too slow to be run counts with what is predicted from its reads. One of
    another sitting counts with its rate in floors of its own, brought to the floors of KVSwap's
    row: machines differ from sitting to sitting. Without floors, or with another batch, it does not
    count.

    Returns:
        One entry for each case of KVSwap. `ratio` is of the rates as measured within one sitting
        (`of_other_sittings`: which of the best are of others); `by_floors` is the same with each
        step taken in floors of its own, which were decoded before and behind it: it leaves out the
        machine's drift, and has the floors' own noise (None across batches).
    """
    found = []
    for ours in rows:
        if not is_kvswap(ours["method"]) or not ours.get(RATE):
            continue
        rates = [
            (_rate_beside(r, ours), r) for r in rows if _is_beside(r, ours, same_batch)
        ]  # fmt: skip
        beside = [(rate, r) for rate, r in rates if rate]
        if not beside:
            continue
        rate, best = max(beside, key=itemgetter(0))
        of_paper = [(rate, r) for rate, r in beside if r["method"] in PAPER_BASELINES]
        paper_rate, best_of_paper = max(of_paper, key=itemgetter(0), default=(0.0, None))
        found.append({
            "method": ours["method"], "device": ours["device"], "context": ours["context"],
            "batch": ours["batch"], "budget": ours["budget"], "kvswap_tokens_per_s": ours[RATE],
            "best": best["method"], "ratio": ours[RATE] / rate,
            "by_floors": _by_floors(ours, best),
            "of_other_sittings": [
                r["method"] for r in (best, best_of_paper) if r and not _is_one_sitting(r, ours)
            ],
            "best_of_paper": None if best_of_paper is None else best_of_paper["method"],
            "ratio_of_paper":
                None if best_of_paper is None else ours[RATE] / paper_rate,
        })  # fmt: skip
    return found


def _by_floors(ours: dict[str, Any], best: dict[str, Any]) -> float | None:
    if best["batch"] != ours["batch"] or not (best.get("floor_ms") and ours.get("floor_ms")):
        return None
    own = ours["whole_ms"] / ours["floor_ms"]
    return float(best["whole_ms"] / best["floor_ms"] / own)


def _is_beside(row: dict[str, Any], ours: dict[str, Any], same_batch: bool) -> bool:
    if row["method"] in UNLIMITED or is_kvswap(row["method"]):
        return False
    same = ["device", "context", "budget", *(["batch"] if same_batch else [])]
    return all(row[name] == ours[name] for name in same)


def _is_one_sitting(row: dict[str, Any], ours: dict[str, Any]) -> bool:
    return bool(row.get("sitting", 0) == ours.get("sitting", 0))


def _rate_beside(row: dict[str, Any], ours: dict[str, Any]) -> float:
    """A row's tokens per second in the sitting of ours; 0 where that is not known."""
    if _is_one_sitting(row, ours):
        return rate_of(row)
    known = row.get("floor_ms") and ours.get("floor_ms") and row["batch"] == ours["batch"]
    return rate_of(row) * row["floor_ms"] / ours["floor_ms"] if known else 0.0


def rate_of(row: dict[str, Any]) -> float:
    """Tokens per second as measured, or predicted from the row's reads; 0 when neither."""
    return float(row.get(RATE) or row.get("predicted_tokens_per_s") or 0.0)


def ratios_text(ratios: Sequence[dict[str, Any]]) -> str:
    """The smallest and the largest ratio on each device."""
    lines = []
    for device, method in dict.fromkeys((ratio["device"], ratio["method"]) for ratio in ratios):
        mine = [r for r in ratios if (r["device"], r["method"]) == (device, method)]
        for key, name in (("ratio", "best"), ("ratio_of_paper", "best_of_paper")):
            known = [ratio for ratio in mine if ratio[key] is not None]
            if not known:
                continue
            low, high = min(known, key=lambda r: r[key]), max(known, key=lambda r: r[key])
            whose = "all baselines" if key == "ratio" else "the paper's baselines"
            lines.append(
                f"{device} (simulated), {method} over the best of {whose}: "
                f"{low[key]:.2f} ({_where(low, name)}) to {high[key]:.2f} ({_where(high, name)})"
            )
    return "\n".join(lines)


def _where(ratio: dict[str, Any], name: str) -> str:
    other = ", of another sitting, by floors" if ratio[name] in ratio["of_other_sittings"] else ""
    return f"{ratio[name]}, {ratio['context']} tokens, batch {ratio['batch']}{other}"


# Throughput in settings A and B of the KVSwap paper -----------------------------------------------

TOTALS, SHARES = "2000MiB,800MiB", "1/13,1/34"
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
    args = read_options(parser, arguments)
    for device in args.devices.split(","):
        if device not in PRESETS:
            raise ConfigError(f"no device {device!r}; choose from {', '.join(PRESETS)}")
    whole_numbers(args.contexts, "--contexts")
    whole_numbers(args.batches, "--batches")
    if args.steps < 1:
        raise ConfigError("--steps must be at least 1")
    return args


class SettingGrid(Grid[Case]):
    """All cases of one run, their rows, and the floors of their batches."""

    SHARED = (
        "setting", "config", "on", "overlap", "memory", "layers", "steps", "step_seconds",
    )  # fmt: skip
    KEY = ("method", "context", "budget", "device", "batch")
    _floor: Floor | None = None

    def __init__(self, args: argparse.Namespace, settings: dict[str, Any]) -> None:
        """Build the model and plan every case.

        Args:
            settings: of the result, which gets the numbers of layers.

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
            cases = cases_of_a(methods, devices, contexts, batches, args.memory, self.machine)
        else:
            cases = cases_of_b(
                methods, devices, contexts, args.totals.split(","), args.shares.split(","),
                self.machine,
            )  # fmt: skip
        settings.update(layers=self.layers, of_layers=self.of_layers)
        # One document of a batch serves all of its cases.
        super().__init__(settings, sorted(cases, key=lambda case: (case.context, case.batch)))
        self._sitting = 1

    @override
    def take_up(self, former: Result) -> None:
        super().take_up(former)
        for name in _GROWING:
            texts = former.settings[name].split(","), self.settings[name].split(",")
            self.settings[name] = ",".join(dict.fromkeys(w for words in texts for w in words))
        asked = parse_settings([former.settings["methods"], self.settings["methods"]])
        self.settings["methods"] = ",".join(method.text for method in asked)
        self._sitting = 1 + max((row.get("sitting", 0) for row in self.rows), default=0)

    @override
    def keys(self, job: Case) -> list[tuple[Any, ...]]:
        return [(job.method, job.context, job.budget, device, job.batch) for device in job.devices]

    @override
    def work(self, job: Case) -> int:
        return job.context * job.batch // 1024 + 4

    @override
    def title(self, job: Case) -> str:
        return f"{job.method}, {job.context} tokens, batch {job.batch}"

    @override
    def measure(self, job: Case, progress: Progress) -> list[Row]:
        if self._floor is None or self._floor.batch != job.batch:
            self.close()
            self._floor = Floor(self.bench, job.batch)
        rows = measure_case(self.bench, job, self._floor)
        return [{**row, "sitting": self._sitting} for row in rows]

    @override
    def close(self) -> None:
        if self._floor is not None:
            self._floor.close()
            self._floor = None

    @override
    def figures(self) -> Row:
        ratios = ratios_of(self.rows, same_batch=self._args.setting == "A")
        return {"rows": self.rows, "ratios": ratios}

    @override
    def report(self) -> str:
        return f"{settings_table(self.rows)}\n{ratios_text(self.figures()['ratios'])}"


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    private = ("out", "json", "resume", "minutes")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    grid = SettingGrid(args, settings)
    result = Result.begin("setting", arguments, settings, seed=args.seed, package="research")
    result.command = result.command.replace("research.setting ", "research.settings ")
    if args.on == "cuda":
        result.machine["gpu"] = torch.cuda.get_device_name()
    return sit(Sitting(result, args), grid, args)
