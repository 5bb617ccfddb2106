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
import random
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import say
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of, settings_of
from penstock.tuner.candidates import Candidate
from penstock.tuner.kvswap_search import Found, KVSwapSearch
from penstock.tuner.tuning_task import TuningTask
from research.tuning.setting_runs import (
    TOP,
    fastest,
    keeps_all,
    keeps_memory,
    middle_run,
    name_of,
    run_settings,
    setting_row,
    sweep_summary,
    sweep_table,
)
from research.tuning.workbench import (
    HeldOutQuality,
    Workbench,
    held_out_texts,
    quality_key,
    read_tuning_options,
    run_bench,
)

# Quality of every setting on a few documents, and of those that matter on more --------------------

Row = dict[str, Any]


class TwoLooks:
    """Hundreds of settings are held to full attention on one or two documents, where a token missed
    says little; the fastest of them, and the picks, on a dozen."""

    def __init__(self, first: HeldOutQuality, closer: HeldOutQuality, floor: float) -> None:
        """
        Args:
            first: on a few documents.
            closer: on those and more, as many tokens of each.
            floor: most KL from full attention, in nats.
        """
        self._first, self._closer, self._floor = first, closer, floor

    def measure(self, policies: Sequence[KVSwap]) -> None:
        """On the first documents; what is known is not run again."""
        self._first.measure(policies)

    def of(self, fields: dict[str, Any]) -> Row:
        """KL, its 90th percentile and agreement of a measured setting, on more documents if it was;
        then "kl_first" is that of the first."""
        key = quality_key(fields)
        first, closer = self._first.found[key], self._closer.found.get(key)
        return dict(first) if closer is None else {**closer, "kl_first": first["kl"]}

    def look_closer(
        self, chosen: Sequence[Candidate], rows: Sequence[Row],
        is_pick: Callable[[Candidate], bool],
    ) -> None:  # fmt: skip
        """Measure picks, and the fastest until `TOP` keep quality, on more; the rows are changed.

        What diverged on the first documents is a part of the mean over all: a setting that used up
        there what all may have cannot pass, and is left as it is.

        Args:
            chosen: all with choices made.
            rows: of the same settings, with throughput, memory and quality. [chosen]
        """
        most_first = self._floor * self._closer.documents / self._first.documents
        pairs = list(zip(chosen, rows, strict=True))
        hopeful = [
            (candidate, row) for candidate, row in pairs
            if keeps_memory(row) and row["kl"] <= most_first
        ]  # fmt: skip
        hopeful.sort(key=lambda pair: -pair[1]["tokens_per_s"])
        kept = 0
        while hopeful and (wanted := TOP - kept):
            kept += self._close(hopeful[:wanted])
            hopeful = hopeful[wanted:]
        self._close([pair for pair in pairs if is_pick(pair[0]) and "kl_first" not in pair[1]])

    def _close(self, pairs: Sequence[tuple[Candidate, Row]]) -> int:
        """Measure settings on more documents; how many keep quality there, and memory."""
        self._closer.measure([candidate.policy for candidate, _ in pairs])
        for _, row in pairs:
            row |= self.of(row["fields"])
        return sum(keeps_all(row, self._floor) for _, row in pairs)

    def summaries(self) -> dict[str, Row]:
        """What was measured on what, for a result."""
        return {
            "quality": self._first.summary(self._floor),
            "closer_quality": self._closer.summary(self._floor),
        }


# The tuner's search, every setting that fits, the fastest once more -------------------------------

ROUNDS, FINAL_ROUNDS, SITTINGS = 2, 6, 7
OPEN_RUNS = 4


class DeviceSweep:
    """Call `run`."""

    def __init__(
        self, name: str, search: KVSwapSearch, task: TuningTask, quality: TwoLooks | None, *,
        measurements: int, most: int | None, seed: int, steps: int, final_steps: int,
    ) -> None:  # fmt: skip
        """
        Args:
            search: over, of one (b, S) only.
            measurements: that it made: surveys, runs, and checks of its picks.
            task: that it was made for.
            quality: None: nothing is measured of it.
            most: settings to run; None: all.
            steps: of each of the `ROUNDS`.
            final_steps: of each of the `FINAL_ROUNDS` of a sitting.
        """
        self._name, self._task, self._quality = name, task, quality
        self._measurements, self._most, self._seed = measurements, most, seed
        self._steps, self._final_steps = steps, final_steps
        self._search = search
        [self._spot], [self._found] = search.spots, search.found
        assert search.profile is not None
        self._profile = search.profile

    def run(self) -> Row:
        """Run all settings, and the fastest again.

        Raises:
            StorageError: the device failed, or the journal cannot be written.
        """
        search, task, found = self._search, self._task, self._found
        chosen = self._chosen()
        rows = self._sweep(chosen)
        if self._quality is not None:
            self._quality.look_closer(chosen, rows, self._is_pick)
        best = fastest(rows, task.floor, TOP)
        for row in rows:
            row["roles"] = _roles(row, found, best)
        return {
            "title": task.device.title, "fit": len(self._spot.found),
            "profile": self._profile.as_dict(),
            "tuner": {
                "runs": search.measurements,
                "surveys": search.surveys,
                "fidelity_checks": self._measurements - search.measurements - search.surveys,
                "decode_steps": search.decode_steps,
                "pick": name_of(found.best.candidate),
                "settings": [fields_of(policy) for policy in search.settings],
                "pick_step_s": None if found.measured is None else found.measured.step_s,
            },
            "sweep": {
                "runs": len(rows), "decode_steps": sum(row["steps"] for row in rows),
            },
            "settings": rows, "final": self._final(chosen, rows, best),
        }  # fmt: skip

    def _chosen(self) -> list[Candidate]:
        """What will run, in an order drawn by lot: the picks are always among it."""
        draw, order = random.Random(self._seed), list(self._spot.found)
        draw.shuffle(order)
        if self._most is None or self._most >= len(order):
            return order
        chosen = [each for each in order if self._is_pick(each)]
        others = [each for each in order if not self._is_pick(each)]
        chosen += others[: max(0, self._most - len(chosen))]
        draw.shuffle(chosen)
        return chosen

    def _is_pick(self, candidate: Candidate) -> bool:
        """Whether it is the tuner's pick or that of the paper's own search."""
        picks = (self._found.best, self._found.paper)
        return any(each and each.candidate.policy == candidate.policy for each in picks)

    def _sweep(self, chosen: list[Candidate]) -> list[Row]:
        """Quality and speed of every chosen setting."""
        if self._quality is not None:
            self._quality.measure([each.policy for each in chosen])
        progress = Progress(len(chosen))
        rows = list[Row]()
        for start in range(0, len(chosen), OPEN_RUNS):
            progress.say(f"every setting of kvswap on {self._name}")
            part = chosen[start : start + OPEN_RUNS]
            figures = run_settings(
                self._task, self._spot, part, name="sweep", steps=self._steps, rounds=ROUNDS,
                progress=progress,
            )  # fmt: skip
            rows += [self._row(each, one) for each, one in zip(part, figures, strict=True)]
        return rows

    def _row(self, candidate: Candidate, figures: Row) -> Row:
        of_tuner = self._search.measured(self._spot, candidate.policy) is not None
        row = setting_row(
            self._profile, candidate, figures, floor=self._task.floor, of_tuner=of_tuner
        )
        return row if self._quality is None else row | self._quality.of(row["fields"])

    def _final(self, chosen: list[Candidate], rows: list[Row], best: list[Row]) -> list[Row]:
        """Picks and fastest once more, all together and for longer; the middle one of sittings."""
        again = [
            (candidate, row) for candidate, row in zip(chosen, rows, strict=True)
            if row in best or row["roles"]
        ]  # fmt: skip
        say(f"{self._name}: the fastest {len(again)} together")
        candidates = [candidate for candidate, _ in again]
        # A cache opened again is some per cent faster or slower, even at one pace.
        sittings = [
            run_settings(
                self._task, self._spot, candidates, name=f"final {number}",
                steps=self._final_steps, rounds=FINAL_ROUNDS,
            )
            for number in range(SITTINGS)
        ]  # fmt: skip
        return [
            self._row(candidate, middle_run(runs)) | {"roles": row["roles"]}
            for (candidate, row), *runs in zip(again, *sittings, strict=True)
        ]


def _roles(row: Row, found: Found, best: list[Row]) -> list[str]:
    """What a setting is: of "best", "pick" (the tuner's) and "paper" (its own search's)."""
    roles = ["best"] if best and row["fields"] == best[0]["fields"] else []
    if row["fields"] == fields_of(found.best.candidate.policy):
        roles.append("pick")
    if found.paper is not None and row["fields"] == fields_of(found.paper.candidate.policy):
        roles.append("paper")
    return roles


# The tuner's pick beside the best of all its settings ---------------------------------------------

KIND = "tuning.sweep"
PAPER_LIMITS = (
    "random weights have no quality to lose: settings within the limits of the paper count as good "
    "(sigma <= 32, G <= 8, MG >= 400)"
)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
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
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    return run_bench(KIND, Sweep, sweep_table, arguments, args)


if __name__ == "__main__":
    run_program(run)
