"""`python -m research.tuning.predict`: predicted beside measured tokens/s and memory.

Source: KVSwap (arXiv 2511.11907), appendix A.3.

On each device the tuner profiles the grid of batches and contexts, as `penstock tune` does. Then a
few settings drawn by lot run at each (batch, context), none of which the tuner has run. All of them
run in three passes, half a minute or more apart, and the middle one of each counts. Steps are told
at the pace at which the tuner's are (`tuner.pace`): machines that others use too have slow seconds
and slow minutes. What the clock had is in the result as well, with errors of its own.
"""

import argparse
import random
from collections.abc import Sequence

from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import say
from penstock.tuner.candidates import Candidate
from penstock.tuner.engine_run import ROUNDS, STEPS
from penstock.tuner.kvswap_search import OPEN_RUNS, KVSwapSearch, Spot
from research.tuning.setting_runs import (
    Row,
    middle_run,
    predict_summary,
    predict_table,
    run_settings,
    setting_row,
)
from research.tuning.workbench import GridTask, Workbench, read_tuning_options, run_bench

KIND = "tuning.predict"
PASSES = 3


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.tuning predict", description=__doc__)
    add = parser.add_argument
    add("--contexts", default="4096,8192,16384", help="tokens of a sequence with its answer")
    add("--batches", default="1,2,4", help="sequences; --memory is for the most and longest")
    add("--settings", type=int, default=2, help="drawn at each batch and context of a device")
    add("--steps", type=int, default=STEPS, help="of a round, of which a pass has four")
    quick = {"contexts": "512,1024", "batches": "1,2", "settings": 1, "steps": 2}
    args = read_tuning_options(parser, arguments, ("settings", "steps"), quick)
    args.contexts = sorted(whole_numbers(args.contexts, "--contexts"))
    args.batches = sorted(whole_numbers(args.batches, "--batches"))
    return args


class Predictions:
    """All devices of a run."""

    def __init__(self, args: argparse.Namespace, result: Result) -> None:
        """Load the model.

        Raises:
            PenstockError: bad input.
        """
        self._args, self._result = args, result
        say(f"{args.model}, {len(args.batches) * len(args.contexts)} places a device")
        self._bench = Workbench(args, kind=KIND, batches=args.batches, contexts=args.contexts)
        self.forget = self._bench.forget

    def run(self) -> None:
        """Measure; the result has the devices that are finished.

        Raises:
            PenstockError: bad input, or a device failed.
        """
        args, bench, found = self._args, self._bench, self._result.figures
        found |= {
            "weights": "random" if bench.is_random else "stored", "limit_bytes": bench.limit_bytes,
            "devices": {}, "rows": [],
        }  # fmt: skip
        for name in args.devices:
            task = bench.task(name)
            rows, about = self._device(name, task)
            found["rows"] += rows
            found["devices"][name] = about
            found["summary"] = predict_summary(found["rows"])
            if args.out:
                self._result.save(args.out)

    def _device(self, name: str, task: GridTask) -> tuple[list[Row], Row]:
        """Rows of one device, and what its tuner did."""
        args, search, rows = self._args, self._bench.search(task), list[Row]()
        assert search.profile is not None
        draw = random.Random(f"{args.seed}/{name}")
        drawn = [(spot, self._drawn(search, spot, draw)) for spot in search.spots]
        progress = Progress(PASSES * sum(len(chosen) for _, chosen in drawn))
        for number in range(PASSES):
            draw.shuffle(drawn)
            for spot, chosen in drawn:
                progress.say(f"{name}, {spot.batch} x {spot.context}, pass {number + 1}")
                self._pass(task, spot, chosen, number, progress)
        for spot, chosen in drawn:
            passes = [self._pass(task, spot, chosen, number) for number in range(PASSES)]
            for each, *runs in zip(chosen, *passes, strict=True):
                row = setting_row(
                    search.profile, each, middle_run(runs), floor=task.floor, of_tuner=False
                )
                where = {"device": name, "batch": spot.batch, "context": spot.context}
                rows.append(where | row)
        about = {
            "title": task.device.title, "runs": len(search.runs),
            "profile": search.profile.as_dict(),
        }  # fmt: skip
        rows.sort(key=lambda row: (row["batch"], row["context"]))
        return rows, about

    def _pass(
        self, task: GridTask, spot: Spot, chosen: list[Candidate], number: int,
        progress: Progress | None = None,
    ) -> list[Row]:  # fmt: skip
        """Figures of one pass, a few settings open at a time; those of the journal if it has it."""
        return [
            row for start in range(0, len(chosen), OPEN_RUNS)
            for row in run_settings(
                task, spot, chosen[start : start + OPEN_RUNS], name=f"predict {number}",
                steps=self._args.steps, rounds=ROUNDS, progress=progress,
            )
        ]  # fmt: skip

    def _drawn(self, search: KVSwapSearch, spot: Spot, draw: random.Random) -> list[Candidate]:
        """Settings that the tuner has not run at this place."""
        new = [each for each in spot.found if search.measured(spot, each.policy) is None]
        return draw.sample(new, min(self._args.settings, len(new)))


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    return run_bench(KIND, Predictions, predict_table, arguments, args)


if __name__ == "__main__":
    run_program(run)
