"""`python -m research.search.speed`: step-wise beam search end to end, strategy by strategy.

Source: Locality-Aware Beam Scheduling, section 5 (Figs. 9 to 12).

Who survives a step is drawn by lot and not rated, so that every variant walks the same tree. With
--whole every step of the request runs. Without it, steps are measured at some lengths: the way
there is lengthened as if it had been decoded and saved, its last steps move their blocks without
computing, and time is interpolated; where beams share loads, all steps move their blocks once, so
that bytes are not interpolated. That is for host memory as the slow tier: nothing was written. All
beams of `layerwise` and `resident` go together, so that these two are measured at one step length.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, say, sit
from penstock.evaluate.text_table import format_table
from penstock.models.loader import CausalLM, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES, random_model
from penstock.storage.store import parse_location
from research.clusters.recording import model_name
from research.grid import Grid, attempt
from research.search.search_row import SearchBench, measure_row
from research.search.variants import BASELINE, VARIANTS, SearchCase

# A line for each row, speed-ups, and bytes against the plan ---------------------------------------

Row = dict[str, Any]
_HEADER = (
    "beams, step, variant", "seconds", "tok/s", "gain", "stall", "GiB loaded", "of base",
    "plan off", "GiB written", "groups", "fast GiB", "way",
)  # fmt: skip


def speed_table(rows: Sequence[Row]) -> str:
    """A line for each row, then notes.

    "gain": time of layer-wise offloading over the row's, for the request; "stall": share of the
    time in which the model waited for bytes; "plan off": bytes of the steps that were measured or
    moved against the transfer model; "groups": most in a step; "~": interpolated between places.
    """
    lines: list[list[str]] = []
    for row in rows:
        step = "any" if row["any_step"] else str(row["step_tokens"])
        name = f"{row['beams']:3d}  {step:>4}  {row['variant']}"
        why = row.get("skipped") or row.get("error")
        lines.append([name, why] if why else [name, *_cells(row, baseline_of(rows, row["beams"]))])
    notices = [
        f"{row['beams']} beams, {row['variant']}: {notice}"
        for row in rows for notice in row.get("notices", ())
    ]  # fmt: skip
    parts = [format_table(_HEADER, lines), *dict.fromkeys(notices), *_notes(rows)]
    return "\n".join(parts)


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows that ran."""
    return [row for row in rows if "request" in row]


def baseline_of(rows: Sequence[Row], beams: int) -> Row | None:
    """Layer-wise offloading of so many beams, if it ran."""
    found = [r for r in measured(rows) if (r["beams"], r["variant"]) == (beams, BASELINE)]
    return found[0] if found else None


def gain_of(row: Row, baseline: Row | None) -> float | None:
    """How many times faster a row is than the baseline."""
    if baseline is None:
        return None
    return float(baseline["request"]["seconds"] / row["request"]["seconds"])


def _cells(row: Row, baseline: Row | None) -> list[str]:
    request, compared = row["request"], row.get("compared_moved") or row["compared"]
    sign = "~" if request["is_interpolated"] else ""
    of_bytes = "" if request["has_all_bytes"] else "~"
    gain, share = gain_of(row, baseline), None
    if baseline is not None and baseline["request"]["loaded_bytes"]:
        share = request["loaded_bytes"] / baseline["request"]["loaded_bytes"]
    off = None if compared["percent"] is None else f"{compared['percent']:+.2f} %"
    if off is None:
        off = "none" if not compared["measured_bytes"] else "none planned"
    return [
        sign + f"{request['seconds']:.1f}", f"{request['tokens_per_s']:.0f}",
        "-" if gain is None else f"{gain:.2f}x", f"{request['stall_share']:.1%}",
        of_bytes + _gib(request["loaded_bytes"]), "-" if share is None else f"{share:.2%}",
        off, of_bytes + _gib(request["written_bytes"]),
        str(max(len(entry["groups"]) for entry in row["steps"])),
        f"{row['memory']['used_bytes'] / 2**30:.2f}", row["way"],
    ]  # fmt: skip


def _notes(rows: Sequence[Row]) -> list[str]:
    """What full blocks explain of the baseline's difference, and where the bytes lie."""
    notes = []
    for row in measured(rows):
        compared = row["compared"]
        explained = compared.get("explained_by_blocks")
        if explained is not None and compared["predicted_bytes"] and compared["full_block_bytes"]:
            notes.append(
                f"{row['beams']} beams, {row['variant']}: {compared['percent']:+.2f} % off Eq. 1-3,"
                f" of which full blocks explain {explained:.1%}"
                f" (measured: {compared['measured_bytes'] / compared['full_block_bytes']:.4f} times"
                " Eq. 1-3 of full blocks)"
            )
    for row in measured(rows):
        memory = row["memory"]
        if memory["over_budget"] and memory["used_bytes"] > memory["budget_bytes"]:
            used, budget = format_bytes(memory["used_bytes"]), format_bytes(memory["budget_bytes"])
            notes.append(
                f"{row['beams']} beams, {row['variant']}: takes {used} of fast memory where the "
                f"budget is {budget}"
            )
    stores = dict.fromkeys(row["store"] for row in measured(rows) if row["variant"] == BASELINE)
    stores |= dict.fromkeys(row["store"] for row in measured(rows) if not row["any_step"])
    return [*notes, *(f"slow tier: {store}" for store in stores)]


def _gib(num_bytes: float) -> str:
    size = num_bytes / 2**30
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


# Step-wise beam search end to end, strategy by strategy -------------------------------------------

KIND = "search.speed"
QUICK = {
    "config": "tiny", "beams": "4,8", "steps": "16,32", "prompt_tokens": 32, "tokens": 96,
    "memory": "1200KiB", "whole": "all", "device": "cpu",
}  # fmt: skip
"""A run of seconds, to see that everything works."""
_SHARED = (
    "model", "layers", "dtype", "device", "width", "prompt_tokens", "tokens", "memory", "store",
    "lengths", "repeat", "lead_in", "block_tokens", "no_moves", "eager",
)  # fmt: skip
"""Settings that a result which is gone on with must have in common."""

Key = tuple[int, int, str]
"""Beams, tokens of a step, variant."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.search", description=__doc__)
    add = parser.add_argument
    add("--config", default="opt-125m", choices=list(ARCHITECTURES), help="random weights")
    add("--model", metavar="FOLDER", help="a model in place of --config: recall, or a folder")
    add("--layers", type=int, help="layers of --config (default: all)")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", help="default: float32 on the CPU, float16 on a GPU")
    add("--beams", default="16,32,64", help="candidates of a step")
    add("--width", type=int, default=2, help="of them, how many go on from one survivor")
    add("--steps", default="32,64,128", help="tokens of a step")
    add("--prompt-tokens", type=int, default=128)
    add("--tokens", type=int, default=1920, help="tokens that a beam generates")
    add("--memory", default="7GiB", help="fast memory for KV: 7GiB, 1/4 of all beams, auto")
    add("--store", default="auto", help="the slow tier: auto, a folder, memory, ufs, ...")
    add("--block-tokens", type=int, default=16)
    add("--variants", default=",".join(VARIANTS))
    add("--lengths", default="512,1024,1536,1920", help="places: steps that begin about there")
    add("--repeat", type=int, default=1, help="measured steps at each place")
    add("--lead-in", type=int, default=2, metavar="STEPS",
        help="before a place: steps that move their blocks without computing")  # fmt: skip
    add("--no-moves", action="store_true",
        help="do not move the blocks of all steps once, where beams share loads")  # fmt: skip
    add("--row-seconds", type=float, default=15.0, help="cut a layer-wise step to about this")
    add("--whole", nargs="?", const="all", default="", metavar="VARIANTS",
        help="run every step of these variants (default: all), and no places")  # fmt: skip
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--quick", action="store_true", help="a tiny model on the CPU, in seconds")
    if "--quick" in arguments:
        parser.set_defaults(**QUICK)
    args = read_options(parser, arguments)
    if min(args.repeat, args.block_tokens, args.layers or 1) < 1 or args.layers == 0:
        raise ConfigError("--repeat, --block-tokens and --layers must be at least 1")
    if args.lead_in < 0:
        raise ConfigError("--lead-in must be at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; try --device cpu")
    if args.dtype is None:
        args.dtype = "float32" if args.device == "cpu" else "float16"
    if args.dtype not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"--dtype {args.dtype} is not one of float32, float16, bfloat16")
    if args.device == "cpu" and not args.whole:
        args.whole = "all"
        say("on the CPU the slow tier is a file: every step runs (--whole)")
    return args


def variant_names(text: str, option: str) -> list[str]:
    """Variants in the order of `VARIANTS`; "all" for all of them.

    Raises:
        ConfigError: there is no such variant.
    """
    asked = list(VARIANTS) if text == "all" else text.split(",") if text else []
    for name in asked:
        if name not in VARIANTS:
            raise ConfigError(f"{option}: {name!r} is none of {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name in asked]


class SearchGrid(Grid[Key]):
    """All rows of a run, and the model that they share."""

    SHARED = _SHARED
    KEY = ("beams", "step_tokens", "variant")
    _bench: SearchBench

    def __init__(self, args: argparse.Namespace, settings: dict[str, Any]) -> None:
        """Read what is to be measured; the model is built by `open`.

        Raises:
            ConfigError: a number or a name makes no sense.
        """
        self._args = args
        steps = whole_numbers(args.steps, "--steps")
        names = variant_names(args.variants, "--variants")
        self._whole = set(variant_names(args.whole, "--whole"))
        self._lengths = whole_numbers(args.lengths, "--lengths")
        jobs = [
            (beams, step, name)
            for beams in whole_numbers(args.beams, "--beams") for step in steps for name in names
            if VARIANTS[name].in_steps or step == steps[0]
        ]  # fmt: skip
        super().__init__(settings, jobs)
        for beams, step, name in jobs:
            case = self._case(beams, step)
            if name not in self._whole:
                case.steps_at(self._lengths, args.repeat)

    def _case(self, beams: int, step_tokens: int) -> SearchCase:
        args = self._args
        return SearchCase(
            beams=beams, width=args.width, step_tokens=step_tokens, new_tokens=args.tokens,
            prompt_tokens=args.prompt_tokens, block_tokens=args.block_tokens, seed=args.seed,
        )  # fmt: skip

    @override
    def title(self, job: Key) -> str:
        return f"{job[0]} beams, steps of {job[1]}, {job[2]}"

    @override
    def take_up(self, former: Result) -> None:
        super().take_up(former)
        jobs = set(self.jobs)
        self.held.rows = [
            row for row in self.rows
            if self.key_of(row) not in jobs or "way" not in row
            or (row["way"] == "whole") == (row["variant"] in self._whole)
        ]  # fmt: skip

    @override
    def report(self) -> str:
        return speed_table(self.rows)

    @override
    def open(self) -> None:
        args, began = self._args, time.perf_counter()
        device = torch.device(args.device)
        if args.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        say(f"{'loading' if args.model else 'building'} {args.model or args.config}")
        model = self._model(device)
        positions, wanted = inspect_model(model).max_positions, args.prompt_tokens + args.tokens
        if positions < wanted:
            raise ConfigError(f"the model has {positions:,} positions; {wanted:,} are asked for")
        say(f"ready after {time.perf_counter() - began:.1f} s")
        self._bench = SearchBench(
            model=model, device=device, memory=args.memory, store=args.store,
            lengths=self._lengths, repeat=args.repeat, lead_in=args.lead_in,
            moves_all=not args.no_moves, row_seconds=args.row_seconds, cuda_graphs=not args.eager,
        )  # fmt: skip

    def _model(self, device: torch.device) -> CausalLM:
        args = self._args
        if args.model:
            return load(args.model, dtype=args.dtype, device=device).model
        return random_model(
            args.config, max_positions=args.prompt_tokens + args.tokens, seed=args.seed,
            dtype=getattr(torch, args.dtype), device=device, layers=args.layers,
        )  # fmt: skip

    @override
    def measure(self, job: Key, progress: Progress) -> list[dict[str, Any]]:
        beams, step_tokens, name = job
        row: dict[str, Any] = {"beams": beams, "step_tokens": step_tokens, "variant": name}
        row["any_step"] = not VARIANTS[name].in_steps
        row |= VARIANTS[name].arguments

        def measured() -> dict[str, Any]:
            case = self._case(beams, step_tokens)
            return measure_row(self._bench, case, name, whole=name in self._whole)

        return [attempt(row, measured, self._bench.device)]


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    private = ("out", "json", "resume", "minutes", "quick", "config")
    settings = {k: v for k, v in vars(args).items() if k not in private}
    settings["model"] = model_name(args.model) if args.model else args.config
    settings["weights"] = "stored" if args.model else "random"
    if "/" in args.store:
        settings["store"] = "a folder"
    grid, place = SearchGrid(args, settings), parse_location(args.store)[1]
    result = Result.begin(
        KIND, arguments, settings, seed=args.seed, store="auto" if place == "memory" else place,
        package="research",
    )  # fmt: skip
    return sit(Sitting(result, args), grid, args)


if __name__ == "__main__":
    run_program(run)
