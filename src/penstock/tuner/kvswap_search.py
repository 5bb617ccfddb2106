"""KVSwapSearch: profile a few of KVSwap's settings, fit, solve for every (b, S), check the best.

Source: KVSwap (arXiv 2511.11907), appendix A.3 and A.4; see `BlockProfile` and `solver` for the
differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.core.byte_size import format_bytes
from penstock.core.errors import AdapterError, BudgetError
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import fields_of
from penstock.tuner.block_profile import BlockProfile, Work, fit_profile, work_of
from penstock.tuner.candidates import Candidate, Seat, candidates, lighter_twin
from penstock.tuner.engine_run import (
    ROUNDS,
    EngineRun,
    StepFigures,
    as_dict,
    at_one_pace,
    room_for,
    run_together,
)
from penstock.tuner.solver import Expected, best_solutions, keeps_quality, paper_solution
from penstock.tuner.tuning_task import TuningTask, choice_of_points

POINTS, CHECKS = 6, 4
"""Settings that are measured where only one (b, S) is wanted: to fit, and to check."""
CORNER_POINTS, CORNER_CHECKS = 5, 2
"""And at each corner of a grid."""
TURNS = 2
"""In a grid the rounds of what is run to fit are taken in so many turns, minutes apart: machines
that others use too have slow minutes, and a slow corner bends everything."""
FINALISTS = 3
"""The fastest of all that were run at a place, and the lighter twin of the fastest, run again,
together: what differs by less than the machine's own noise is told apart by luck otherwise."""
FINAL_ROUNDS = 16
"""Of that last run."""
TWIN_SHARE = 1.05
"""A lighter twin is taken unless it was slower than this. It does less of the same work; two caches
opened anew differ by 5 % more or less than they did (a standard deviation,
research/notes/2026-11-23-play-off.md)."""
_SURVEY_RANK = 48
"""Of the index that a survey ranks with; which tokens win hardly depends on it."""
_SPREAD_SHARE = 0.7
"""Of the work: what `spread` takes; the rest is `solve`."""
OPEN_RUNS = 8
"""Most caches that are kept open together, where memory and disk have room for them."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One (b, S) with everything that fits its budget."""

    batch: int
    context: int
    limit_bytes: int
    found: list[Candidate] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The solution of one (b, S)."""

    spot: Spot
    best: Expected
    measured: StepFigures | None
    """Where it was run."""
    paper: Expected | None
    """What the paper's own search would take."""


class KVSwapSearch:
    """Call `spread`, then `solve`; everything measured goes through the task's journal."""

    def __init__(self, task: TuningTask) -> None:
        """List what fits.

        Raises:
            BudgetError: nothing does at some (b, S); names the smallest budget that would do.
        """
        self._task = task
        self._seat: Seat = task.seat(KVSwap())
        listed = [self._listed(b, s) for b in task.batches for s in task.contexts]
        self._require_some(listed)
        self.spots = [spot for spot, _ in listed]
        """Every (b, S)."""
        self.runs: list[tuple[Spot, KVSwap, Work, StepFigures]] = []
        """Everything that was measured."""
        self.found: list[Found] = []
        """The solutions, one for each (b, S), once `solve` was called."""
        self.profile: BlockProfile | None = None
        """What they rest on."""
        self._finals: dict[tuple[int, int, KVSwap], StepFigures] = {}
        """Of finalists, by batch, context and setting."""
        self._run_steps = 0
        self._ruled_out: set[KVSwap] = set()
        self._more_turns = 0
        self.surveys = 0
        """Lengths at which a sequence was decoded to see what is selected."""

    def _listed(self, batch: int, context: int) -> tuple[Spot, int | None]:
        """One (b, S), and the least budget of what did not fit."""
        limit = self._task.limit_for(batch)
        found, least = candidates(
            self._seat, self._task.tables, batch=batch, context=context, max_tokens=context,
            limit_bytes=limit,
        )  # fmt: skip
        return Spot(batch=batch, context=context, limit_bytes=limit, found=found), least

    def _require_some(self, listed: Sequence[tuple[Spot, int | None]]) -> None:
        """Refuse a budget that leaves a (b, S) without settings, or without faithful ones."""
        task = self._task
        empty = [(spot, least) for spot, least in listed if not spot.found]
        needed = max(
            (math.ceil(least * task.max_batch / spot.batch) for spot, least in empty if least),
            default=None,
        )
        if needed is not None:
            raise BudgetError(
                f"nothing fits {format_bytes(task.limit_bytes)} for {task.max_batch} x "
                f"{task.max_context} tokens; the smallest budget that would do is "
                f"{format_bytes(needed)} ({needed} bytes)", needed_bytes=needed,
            )  # fmt: skip
        if empty:
            raise AdapterError(
                f"the adapter has {self._seat.most_rank} components a token, fewer than any "
                "setting of kvswap that is tried; make one of 32 or more (penstock calibrate)"
            )
        for spot, _ in listed:
            if not any(keeps_quality(each, task.floor) for each in spot.found):
                raise BudgetError(self._too_far(spot))

    def _too_far(self, spot: Spot) -> str:
        closest = min(each.kl or 0.0 for each in spot.found)
        return (
            f"no setting of kvswap that fits {format_bytes(spot.limit_bytes)} for {spot.batch} x "
            f"{spot.context} tokens stays within {self._task.floor} nats of full attention (the "
            f"closest: {closest:.3f}); give more memory, or a higher --floor"
        )

    @property
    def corners(self) -> list[Spot]:
        """Where settings are run: the grid's ends."""
        ends = set(self._task.corners)
        return [each for each in self.spots if (each.batch, each.context) in ends]

    # Measuring --------------------------------------------------------------------------------

    def _surveyed(self, spot: Spot) -> Spot:
        """The same place with what each candidate fetches behind the task's text."""
        self._task.say(0.0, f"looking at what is selected behind {spot.context} tokens")
        choices = {each.policy: each.choice for each in spot.found}
        rank = min(_SURVEY_RANK, self._seat.most_rank)
        counted = self._task.fetches(spot.context, sorted(set(choices.values())), rank=rank)
        if counted is None:
            return spot
        self.surveys = len({each.context for each in self.spots})
        found = [
            replace(each, work=each.work.fetching(*(
                spot.batch * count for count in counted[choices[each.policy]]
            )))
            for each in spot.found
        ]  # fmt: skip
        return replace(spot, found=found)

    def spread(self) -> None:
        """Count what settings fetch, and run some that lie far apart, at every corner."""
        self.spots = [self._surveyed(spot) for spot in self.spots]
        corners = self.corners
        points = POINTS if len(corners) == 1 else CORNER_POINTS
        chosen = []
        for spot in corners:
            good = [each for each in spot.found if keeps_quality(each, self._task.floor)]
            pool = good if len(good) >= 2 * points else spot.found
            taken = choice_of_points([_features(each) for each in pool], points)
            chosen.append((spot, [pool[i] for i in taken]))
        turns = 1 if len(corners) == 1 else TURNS
        width = _SPREAD_SHARE / (turns * len(corners))
        for turn in range(turns):
            for number, (spot, settings) in enumerate(chosen):
                self.measure(
                    spot, settings, width * (turn * len(corners) + number), width, turn=turn,
                    turns=turns,
                )  # fmt: skip

    def measure(
        self, spot: Spot, chosen: Sequence[Candidate], share: float = 0.0, width: float = 1.0, *,
        turn: int = 0, turns: int = 1,
    ) -> None:  # fmt: skip
        """Run candidates that were not run yet.

        Args:
            share, width: for progress: where this begins and how much of the work it is.
            turn, turns: a candidate's rounds may be taken in turns, apart from each other; with
                the last one it was run, and its faster turn counts.
        """
        todo = [each for each in chosen if self.measured(spot, each.policy) is None]
        together = min(OPEN_RUNS, self._task.most_open(spot.batch, spot.context))
        for start in range(0, len(todo), together):
            part = todo[start : start + together]
            what = f"running kvswap at {spot.batch} x {spot.context}"
            self._task.say(share + width * start / len(todo), what)
            self._figures(spot, part, ROUNDS // turns, turn)
            if turn + 1 < turns:
                continue
            taken = [self._figures(spot, part, ROUNDS // turns, each) for each in range(turns)]
            for candidate, *figures in zip(part, *taken, strict=True):
                fastest = min(at_one_pace(figures), key=lambda each: each.step_s)
                work = self._work(spot, candidate, fastest)
                self.runs.append((spot, candidate.policy, work, fastest))
                self._more_turns += turns - 1
                self._run_steps += sum(each.steps for each in figures)

    def measured(self, spot: Spot, policy: KVSwap) -> StepFigures | None:
        """What a setting took, if it was run."""
        final = self._finals.get((spot.batch, spot.context, policy))
        if final is not None:
            return final.at(self._task.pace_s)
        for where, what, _, figures in self.runs:
            if where is spot and what == policy:
                return figures.at(self._task.pace_s)
        return None

    def _figures(
        self, spot: Spot, part: Sequence[Candidate], rounds: int = ROUNDS, turn: int = 0
    ) -> list[StepFigures]:
        """From the journal, or by running what is not there."""
        task, journal = self._task, self._task.journal
        keys = [
            {
                "run": "kvswap", "disk": task.store, "batch": spot.batch, "context": spot.context,
                "limit": spot.limit_bytes, "fields": fields_of(each.policy), "rounds": rounds,
                "turn": turn,
            }
            for each in part
        ]  # fmt: skip
        missing = [i for i, key in enumerate(keys) if not journal.knows(key)]
        open_runs: list[EngineRun] = []
        try:
            for i in missing:
                work = task.workpiece(spot.batch, spot.context, room_for(rounds))
                run = EngineRun(
                    work, part[i].policy, store=task.store, limit_bytes=spot.limit_bytes
                )
                open_runs.append(run)
            done = run_together(open_runs, rounds=rounds)
            for i, figures in zip(missing, done, strict=True):
                journal.note(keys[i], as_dict(figures))
        finally:
            for run in open_runs:
                run.close()
        return [StepFigures(**journal.recall(key)) for key in keys]

    def _work(self, spot: Spot, candidate: Candidate, figures: StepFigures) -> Work:
        """What was really done."""
        missing = figures.units_wanted - figures.units_hit
        plan = candidate.plan
        work = work_of(
            plan, rows_per_sequence=1, num_layers=self._seat.shape.num_layers,
            context=spot.context, hit_rate=figures.hit_rate, row_bytes=0,
            true_query_layers=self._seat.true_query_layers,
        )  # fmt: skip
        return replace(work, missing=missing, reads=figures.reads, read_bytes=figures.read_bytes)

    # Solving ----------------------------------------------------------------------------------

    def fit(self) -> BlockProfile:
        """The profile of everything measured so far, at the pace of the task.

        That is the middle one of what was measured when a profile is made for the first time.
        """
        task = self._task
        task.pace_s = task.pace_s or float(np.median([each.pace_s for *_, each in self.runs]))
        runs = [(work, figures.at(task.pace_s)) for _, _, work, figures in self.runs]
        return fit_profile(runs, self._task.device)

    def solve(self) -> tuple[BlockProfile, list[Found]]:
        """Check the best predicted settings at the corners, fit again, solve everywhere."""
        profile, corners = self.fit(), self.corners
        checks = CHECKS if len(corners) == 1 else CORNER_CHECKS
        for number, spot in enumerate(corners):
            if self._checked(spot) >= checks:
                continue
            for _ in range(checks // 2):
                new = [e.candidate for e in self._ranked(profile, spot) if not self._knows(spot, e)]
                share = _SPREAD_SHARE + (1 - _SPREAD_SHARE) * number / len(corners)
                self.measure(spot, new[:2], share, (1 - _SPREAD_SHARE) / len(corners))
                profile = self.fit()
            self._play_off(profile, spot)
        self.profile = profile
        self.found = [self._found(profile, spot) for spot in self.spots]
        return profile, self.found

    def _play_off(self, profile: BlockProfile, spot: Spot) -> None:
        """Run the fastest of what was run at a place once more, together with its lighter twin."""
        run = [e.candidate for e in self._ranked(profile, spot) if self._knows(spot, e)]
        run.sort(key=lambda each: self._took(spot, each))
        room = self._task.most_open(spot.batch, spot.context)
        first = run[:1] + [self._lighter_twin(spot, each) for each in run[:1]]
        best = list({each.policy: each for each in first + run}.values())[: min(FINALISTS, room)]
        if len(best) < 2:
            return
        for candidate, figures in zip(best, self._figures(spot, best, FINAL_ROUNDS), strict=True):
            self._finals[spot.batch, spot.context, candidate.policy] = figures

    def _lighter_twin(self, spot: Spot, candidate: Candidate) -> Candidate:
        allowed = [each for each in self._left(spot) if keeps_quality(each, self._task.floor)]
        return lighter_twin(candidate, allowed)

    @property
    def settings(self) -> list[KVSwap]:
        """All that were run, each once."""
        run = [policy for _, policy, _, _ in self.runs]
        return list(dict.fromkeys([*run, *(policy for _, _, policy in self._finals)]))

    @property
    def measurements(self) -> int:
        """Caches that were opened and run: every turn counts, and finalists' last run."""
        return len(self.runs) + self._more_turns + len(self._finals)

    @property
    def decode_steps(self) -> int:
        """What all these took, the finalists' last run too; each is of all sequences at once."""
        return self._run_steps + sum(each.steps for each in self._finals.values())

    def _checked(self, spot: Spot) -> int:
        """Settings run at a corner that is not ruled out, beside the spread-out ones."""
        points = POINTS if len(self.corners) == 1 else CORNER_POINTS
        run = [policy for where, policy, _, _ in self.runs if where is spot]
        return len([policy for policy in run[points:] if policy not in self._ruled_out])

    def _ranked(self, profile: BlockProfile, spot: Spot) -> list[Expected]:
        """Everything that may be picked, the fastest first.

        Raises:
            BudgetError: everything was ruled out.
        """
        left = self._left(spot)
        ranked = best_solutions(profile, left, floor=self._task.floor, count=len(left))
        if not ranked:
            raise BudgetError(self._too_far(spot))
        return ranked

    def _left(self, spot: Spot) -> list[Candidate]:
        """What is not ruled out."""
        return [each for each in spot.found if each.policy not in self._ruled_out]

    def rule_out(self, policy: KVSwap) -> None:
        """Never pick this setting (it was measured, and is too far from full attention)."""
        self._ruled_out.add(policy)

    @property
    def picks(self) -> list[KVSwap]:
        """The settings of all solutions, each once."""
        return list(dict.fromkeys(found.best.candidate.policy for found in self.found))

    def _knows(self, spot: Spot, expected: Expected) -> bool:
        return self.measured(spot, expected.candidate.policy) is not None

    def _took(self, spot: Spot, candidate: Candidate) -> float:
        """Seconds of a step; infinite where it was not run."""
        figures = self.measured(spot, candidate.policy)
        return math.inf if figures is None else figures.step_s

    def _found(self, profile: BlockProfile, spot: Spot) -> Found:
        floor = self._task.floor
        ranked = self._ranked(profile, spot)
        run = [each for each in ranked if self._knows(spot, each)]
        best = ranked[0]
        if run:  # where settings were run, the fastest of these; of finalists, if there are any
            finals = [e for e in run if (spot.batch, spot.context, e.candidate.policy) in
                      self._finals]  # fmt: skip
            times = {e.candidate.policy: self._took(spot, e.candidate) for e in run}
            best = min(finals or run, key=lambda each: times[each.candidate.policy])
            twin = self._lighter_twin(spot, best.candidate).policy
            if times.get(twin, math.inf) <= TWIN_SHARE * times[best.candidate.policy]:
                [best] = [each for each in run if each.candidate.policy == twin]
        return Found(
            spot=spot, best=best, measured=self.measured(spot, best.candidate.policy),
            paper=paper_solution(profile, spot.found, floor=floor),
        )  # fmt: skip


def _features(candidate: Candidate) -> list[float]:
    """What tells settings apart, on logarithmic scales."""
    work = candidate.work
    return [
        math.log2(candidate.plan.group_tokens), math.log2(1 + work.selected),
        math.log2(1 + work.missing), math.log2(work.index_bytes + 1),
        math.log2(work.attended_tokens), float(work.copies_weights),
    ]  # fmt: skip
