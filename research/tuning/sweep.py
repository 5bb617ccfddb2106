"""`python -m research.tuning.sweep`: the tuner's pick beside the best of all its settings.

Source: KVSwap (arXiv 2511.11907), section 3.5 and appendix A.

On each device first the tuner searches, as `penstock tune` does. Then every setting that fits the
budget runs, four at a time, in an order drawn by lot; and at last the fastest, the tuner's pick and
the pick of the paper's own search run again, all together. Quality is measured on documents that no
lookup table was made from: of every setting on a few, of those that run again on a dozen, because a
token missed in a few documents says little. Models with random weights have none: for them the
limits of the paper stand guard (`PaperTables`).
"""

import argparse
from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import say
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import settings_of
from research.tuning.held_out import HeldOutQuality, held_out_texts
from research.tuning.options import read_tuning_options, run_bench
from research.tuning.summary import sweep_summary
from research.tuning.sweep_device import DeviceSweep
from research.tuning.table import sweep_table
from research.tuning.two_looks import TwoLooks
from research.tuning.workbench import Workbench

KIND = "tuning.sweep"
PAPER_LIMITS = (
    "random weights have no quality to lose: settings within the limits of the paper count as good "
    "(sigma <= 32, G <= 8, MG >= 400)"
)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a setting makes no sense.
    """
    parser = argparse.ArgumentParser(prog="python -m research.tuning sweep", description=__doc__)
    add = parser.add_argument
    add("--context", type=int, default=8192, help="tokens of a sequence, its answer included")
    add("--batch", type=int, default=1)
    add("--settings", type=int, help="run only so many, drawn by lot (default: all that fit)")
    add("--steps", type=int, default=6, help="of a round, of which each setting has two")
    add(
        "--final-steps",
        type=int,
        default=16,
        help="of a round of the last run, which has six in each of seven sittings",
    )
    add("--texts", type=int, default=2, help="held-out documents for quality")
    add("--final-texts", type=int, default=12, help="such documents for what runs again")
    add("--forced", type=int, default=32, help="tokens that are decoded at the end of each")
    quick = {
        "context": 1024, "settings": 8, "steps": 2, "final_steps": 2, "texts": 1,
        "final_texts": 2, "forced": 8,
    }  # fmt: skip
    sizes = ("batch", "context", "settings", "steps", "final_steps", "texts", "forced")
    args = read_tuning_options(parser, arguments, sizes, quick)
    if args.final_texts < args.texts:
        raise ConfigError(
            f"--final-texts {args.final_texts} must be at least --texts {args.texts}: what runs "
            "again is measured on those and more"
        )
    return args


class Sweep:
    """All devices of a run."""

    def __init__(self, args: argparse.Namespace, result: Result) -> None:
        """Load the model.

        Raises:
            PenstockError: bad input.
        """
        self._args, self._result = args, result
        say(f"{args.model}, {args.batch} x {args.context:,} tokens, memory {args.memory}")
        self._bench = Workbench(args, kind=KIND, batches=[args.batch], contexts=[args.context])
        self.forget = self._bench.forget

    def run(self) -> None:
        """Measure; the result has what is finished.

        Raises:
            PenstockError: bad input, or a device failed.
        """
        args, bench, found = self._args, self._bench, self._result.figures
        found |= {
            "weights": "random" if bench.is_random else "stored", "limit_bytes": bench.limit_bytes,
            "floor": args.floor, "listed": sum(1 for _ in settings_of(KVSwap)),
            "quality": {"guard": PAPER_LIMITS}, "devices": {},
        }  # fmt: skip
        quality = None if bench.is_random else self._quality()
        for name in args.devices:
            task = bench.task(name)
            before = len(task.journal.used)
            search = bench.search(task)
            sweep = DeviceSweep(
                name, search, task, quality, measurements=len(task.journal.used) - before,
                most=args.settings, seed=args.seed, steps=args.steps,
                final_steps=args.final_steps,
            )  # fmt: skip
            device = sweep.run()
            found["devices"][name] = device | {"summary": sweep_summary(device, args.floor)}
            if quality is not None:
                found |= quality.summaries()
            if args.out:
                self._result.save(args.out)

    def _quality(self) -> TwoLooks:
        args, loaded = self._args, self._bench.loaded

        def on(count: int) -> HeldOutQuality:
            texts = held_out_texts(
                loaded, tokens=args.context, forced=args.forced, count=count, seed=args.seed
            )
            journal = self._bench.journal(f"quality-{count}")
            return HeldOutQuality(
                loaded, self._bench.adapter, texts, forced=args.forced, journal=journal
            )

        first = on(args.texts)
        closer = first if args.final_texts == args.texts else on(args.final_texts)
        return TwoLooks(first, closer, args.floor)


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it.

    Raises:
        PenstockError: bad input.
    """
    args = parse_arguments(arguments)
    return run_bench(KIND, Sweep, sweep_table, arguments, args)


if __name__ == "__main__":
    run_program(run)
