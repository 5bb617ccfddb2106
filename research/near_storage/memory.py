"""`python -m research.near_storage.memory`: HillInfer's memory, devices included, beside others'.

Source: HillInfer, section 5.3, which compares memory of the host alone.

A text is prefilled once, and its last tokens are forced on every method. HillInfer has a budget of
the main process. What its processes really hold is measured: what the main process grew by, memory
shared with devices included, and private memory of each device process. Methods without a device
then have a budget by which they hold as many bytes in all. KVSwap has HillInfer's own budget too,
as if a device's memory cost nothing. Nothing is simulated: the disk is the real one.
"""

import argparse
import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.functional import cross_entropy
from typing_extensions import override

from penstock.core.errors import BudgetError, ConfigError, PromptError
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.sitting import Sitting, closed, say
from penstock.evaluate.text_table import format_table
from penstock.generation.prompts import encode
from penstock.methods import SelectionPolicy
from penstock.models.loader import LoadedModel, load
from research.clusters.recording import model_name
from research.clusters.steps import DISK, MAIN, ForcedText, Pace, pace_of, run_group
from research.near_storage.decode_run import OURS, PLAIN, NearCase, NearRow, plain_steps
from research.verified.program import text_of

Row = dict[str, Any]
KIND = "near_storage.memory"
KVSWAP, INT4 = "kvswap", f"{OURS}:bits=4"
NAMES = {
    "full": "all in memory", OURS: "HillInfer", INT4: "HillInfer, INT4 codes",
    PLAIN: "HillInfer without a device", KVSWAP: "KVSwap",
}  # fmt: skip
BOUNDED = f"{OURS}:device_memory="
_PROBE = Pace(warm=2, rounds=1, steps=1)
_LEAST_BYTES = 1 << 20


def method_name(method: str) -> str:
    """For people: a row's method, without its budget."""
    if method.startswith(BOUNDED):
        return f"HillInfer, a device of {method.removeprefix(BOUNDED)}"
    return NAMES[method]


class MemoryCase(NearCase):
    """A method under a budget; KVSwap selects what it would select for a user."""

    @property
    @override
    def policy(self) -> SelectionPolicy:
        plain: SelectionPolicy = parse_setting(self.method).policy
        return plain if plain.name == KVSWAP else super().policy


class MemoryRow(NearRow):
    """A case that also tells the loss of the forced tokens and the bytes of all processes."""

    def __init__(self, *arguments: Any) -> None:
        """See `NearRow`."""
        self._losses: list[float] = []
        super().__init__(*arguments)

    @override
    def _forward(self, first: int, end: int) -> torch.Tensor:
        logits = super()._forward(first, end)
        if end < self._text.ids.shape[1]:
            self._losses.append(float(cross_entropy(logits.float(), self._text.ids[0, end])))
        return logits

    @property
    def total_bytes(self) -> int:
        """Held by all processes now."""
        return total_of(self._memory())

    @override
    def figures(self) -> Row:
        found = super().figures()
        return found | {
            "total_bytes": total_of(found), "loss": math.fsum(self._losses) / len(self._losses)
        }  # fmt: skip


def total_of(row: Row) -> int:
    """Bytes of main process and devices; shared memory counts once."""
    return int(row["main_bytes"] + sum(row["device_bytes"]))


def case_of(method: str, budget: str, *, length: int, alpha: float) -> MemoryCase:
    """A case of one method, such as "hillinfer:bits=4", under a budget; "" for none."""
    head, colon, options = method.partition(":")
    text = f"{head}@{budget}{colon}{options}" if budget else method
    return MemoryCase(section=MAIN, device=DISK, length=length, ratio=alpha, method=text)


class Measured:
    """All rows of one text."""

    def __init__(self, loaded: LoadedModel, text: ForcedText, args: argparse.Namespace) -> None:
        """Take a prefilled text."""
        self._loaded, self._text, self._args = loaded, text, args
        self._case = partial(case_of, length=int(text.ids.shape[1]), alpha=args.alpha)

    def _make(self, pace: Pace, case: MemoryCase) -> MemoryRow:
        return MemoryRow(case, self._text, self._loaded, pace, self._args.row_seconds)

    def _holds(self, case: MemoryCase) -> int:
        say(f"{case.title}: what it holds")
        with closing(self._make(_PROBE, case)) as row:
            return row.total_bytes

    def matched(self, method: str, total: int) -> MemoryCase:
        """The method with the budget by which it holds so many bytes, within a few percent.

        Budgets bound what the ledger counts, and a process holds a little more.
        """
        first = self._case(method, _size(total))
        try:
            over = self._holds(first) - total
        except BudgetError:
            return first  # and says so in its row
        return self._case(method, _size(max(_LEAST_BYTES, total - over)))

    def rows(self, budget: str) -> list[Row]:
        """All methods where HillInfer's main process has a budget."""
        plain_steps(self._loaded)
        near = [self._case(method, budget) for method in (OURS, INT4)]
        totals = [self._holds(case) for case in near]
        if self._args.device_memory:
            near.append(self._case(BOUNDED + self._args.device_memory, budget))
        cases = [
            (self._case("full", ""), ""), *((case, "main") for case in near),
            (self.matched(PLAIN, totals[0]), "total of INT8"),
            (self.matched(KVSWAP, totals[0]), "total of INT8"),
            (self.matched(KVSWAP, totals[1]), "total of INT4"),
            (self._case(KVSWAP, budget), "main"),
        ]  # fmt: skip
        pace = pace_of(self._args)
        rows = run_group(
            [case for case, _ in cases], [partial(self._make, pace, case) for case, _ in cases],
            pace, say, lambda count: None,
        )  # fmt: skip
        return [
            {**row, "budget": budget, "same": same, "name": _bare(row["method"])}
            for row, (_, same) in zip(rows, cases, strict=True)
        ]


def _size(count: int) -> str:
    return f"{count // 1024}KiB"


def _bare(method: str) -> str:
    head, colon, options = method.partition(":")
    return f"{head.partition('@')[0]}{colon}{options}"


def memory_table(figures: Row) -> str:
    """Main process, devices and totals of every row."""
    header = ["tokens, main budget, method", "same", "main MiB", "devices", "total", "ledger",
              "ms/step", "p90", "read MiB", "reads", "loss", "right"]  # fmt: skip
    lines = []
    for row in figures["rows"]:
        name = f"{row['length']:6,} {row['budget']:>4}  {method_name(row['name'])}"
        if "error" in row:
            lines.append([name, row["error"]])
            continue
        lines.append([
            name, row["same"], _mib(row["main_bytes"]), _mib(sum(row["device_bytes"])),
            _mib(row["total_bytes"]), _mib(row["ledger_bytes"]), f"{row['median_ms']:.0f}",
            f"{row['p90_ms']:.0f}", f"{row['read_bytes'] / 2**20:.2f}", f"{row['reads']:,.0f}",
            f"{row['loss']:.3f}", f"{row['right']:.0%}",
        ])  # fmt: skip
    base = _mib(figures["base_bytes"])
    return f"{format_table(header, lines)}\nmain MiB: beyond the {base} of weights and interpreter"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--model", default="recall", help="folder or name")
    add("--text", type=Path, action="append", metavar="FILE", help="default: Python's own library")
    add("--lengths", default="16384,32768", help="tokens of prompt and forced text")
    add("--budgets", default="1/4,1/2", help="of HillInfer's main process, in the full cache")
    add("--alpha", type=float, default=0.1, help="share of the tokens that HillInfer selects")
    add(
        "--device-memory",
        default="",
        metavar="SIZE",
        help="HillInfer once more, with so much for a device itself: it streams other codes",
    )
    add("--steps", type=int, default=24, help="measured steps of a row")
    add("--rounds", type=int, default=4, help="rounds in which the rows take turns")
    add("--warm", type=int, default=14, help="steps before the first round")
    add("--row-seconds", type=float, default=20.0, help="decode fewer steps of a row beyond this")
    add("--threads", type=int, default=1)
    add("--chunk", type=int, default=512, help="tokens per forward pass of the prefill")
    args = read_options(parser, arguments, resume=False, minutes=False)
    args.lengths = whole_numbers(args.lengths, "--lengths")
    args.budgets = args.budgets.split(",")
    if min(args.rounds, args.chunk, args.threads) < 1 or args.steps < args.rounds or args.warm < 2:
        raise ConfigError("--warm is at least 2, --rounds, --chunk, --threads 1, --steps --rounds")
    if not 0 < args.alpha < 1:
        raise ConfigError("--alpha is above 0 and below 1")
    return args


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the table, save the result.

    Raises:
        PenstockError: bad input, or a disk that fails.
    """
    args = parse_arguments(arguments)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json")}
    settings |= {"model": model_name(args.model), "text": [each.name for each in args.text or []]}
    shown = arguments
    for each in args.text or []:
        shown = without_path(shown, "--text", str(each))
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        result = Result.begin(KIND, shown, settings, seed=args.seed, package="research")
        sitting = Sitting(result, args)
        loaded = load(args.model)
        figures: Row = {
            "model": model_name(args.model), "base_bytes": psutil.Process().memory_info().rss,
            "rows": [],
        }  # fmt: skip
        ids = encode(loaded, text_of(args.text or []), alone=False)
        for length in args.lengths:
            if len(ids) < length:
                raise PromptError(f"the text has {len(ids):,} tokens; give more --text")
            say(f"prefilling {length:,} tokens")
            text = ForcedText(loaded, ids[:length], pace_of(args).decoded, args.chunk)
            measured = Measured(loaded, text, args)
            for budget in args.budgets:
                figures["rows"] = figures["rows"] + measured.rows(budget)
                sitting.keep(figures)
        return closed(result, args, memory_table(figures))
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    run_program(run)
