"""One device of a sweep: the tuner's search, every setting that fits, the fastest once more."""

import random
from typing import Any

from penstock.evaluate.progress import Progress
from penstock.evaluate.sitting import say
from penstock.methods.search_space import fields_of
from penstock.tuner.candidates import Candidate
from penstock.tuner.kvswap_search import Found, KVSwapSearch
from penstock.tuner.tuning_task import TuningTask
from research.tuning.setting_runs import middle_run, name_of, run_settings, setting_row
from research.tuning.summary import TOP, fastest
from research.tuning.two_looks import TwoLooks

ROUNDS, FINAL_ROUNDS, SITTINGS = 2, 6, 7
OPEN_RUNS = 4
Row = dict[str, Any]


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
