"""Settings of KVSwap run together on a device, by way of the journal; and their rows."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.evaluate.progress import Progress
from penstock.methods.search_space import fields_of
from penstock.tuner.block_profile import BlockProfile
from penstock.tuner.candidates import Candidate
from penstock.tuner.engine_run import EngineRun, StepFigures, as_dict, room_for, run_together
from penstock.tuner.kvswap_search import Spot
from penstock.tuner.solver import expect, keeps_quality
from penstock.tuner.tuning_task import TuningTask

Row = dict[str, Any]


def run_settings(
    task: TuningTask, spot: Spot, chosen: Sequence[Candidate], *, name: str, steps: int,
    rounds: int, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """What each setting takes, all of them open and taking turns; known ones are not run again.

    Steps are told at the task's pace, `clock_step_s` as the clock had it.

    Args:
        name: of this kind of run, for the journal.
        steps: of a round.
        progress: is moved on by as many as were chosen.

    Returns:
        `StepFigures` as plain data, with the memory that was planned and the most that was held,
        in bytes. [chosen]

    Raises:
        StorageError: the disk is full or cannot be used.
    """
    keys = [
        {
            "run": name, "batch": spot.batch, "context": spot.context, "limit": spot.limit_bytes,
            "steps": steps, "rounds": rounds, "fields": fields_of(each.policy),
        }
        for each in chosen
    ]  # fmt: skip
    journal, open_runs = task.journal, list[EngineRun]()
    is_known = all(journal.knows(key) for key in keys)
    if not is_known:  # together or not at all
        room = room_for(rounds, steps)
        try:
            for each in chosen:
                work = task.workpiece(spot.batch, spot.context, room)
                open_runs.append(
                    EngineRun(work, each.policy, store=task.store, limit_bytes=spot.limit_bytes)
                )
            found = run_together(open_runs, steps=steps, rounds=rounds)
            for key, run, figures in zip(keys, open_runs, found, strict=True):
                journal.note(key, as_dict(figures) | _memory(run))
        finally:
            for run in open_runs:
                run.close()
    if progress is not None:
        (progress.skip if is_known else progress.step)(len(keys))
    return [_paced(journal.recall(key), task.pace_s) for key in keys]


def _paced(row: Row, pace_s: float) -> Row:
    """A row of the journal at another pace."""
    names = [each.name for each in fields(StepFigures)]
    return {**row, **as_dict(StepFigures(**{name: row[name] for name in names}).at(pace_s))}


def middle_run(runs: Sequence[Row]) -> Row:
    """Of several runs of a setting the one whose step is the middle one, with the steps of all, in
    seconds, and the most memory that any held."""
    middle = sorted(runs, key=_step_s)[len(runs) // 2]
    most = {name: max(run[name] for run in runs) for name in ("used_bytes", "peak_bytes")}
    return {**middle, **most, "runs_step_s": [_step_s(run) for run in runs]}


def _step_s(run: Row) -> float:
    return float(run["step_s"])


def _memory(run: EngineRun) -> Row:
    report = run.memory
    return {
        "planned_bytes": run.plan.total_bytes, "used_bytes": report.used_bytes,
        "peak_bytes": report.peak_bytes,
    }  # fmt: skip


def setting_row(
    profile: BlockProfile, candidate: Candidate, found: Row, *, floor: float, of_tuner: bool
) -> Row:
    """One setting: what it is, what was predicted and what was measured.

    Args:
        profile: the tuner's last.
        found: of `run_settings`.
        of_tuner: the tuner had measured this setting itself.
    """
    kl, expected = candidate.kl, expect(profile, candidate)
    work = profile.merged(candidate.work)
    return {
        **name_of(candidate), "of_tuner": of_tuner,
        "predicted_step_s": expected.step_s, "predicted_stall_s": expected.stall_s,
        "predicted_tokens_per_s": expected.tokens_per_s,
        "predicted_missing": work.missing, "predicted_reads": work.reads,
        "predicted_read_bytes": work.read_bytes, "predicted_bytes": candidate.resident_bytes,
        "tokens_per_s": work.batch / found["step_s"],
        "clock_tokens_per_s": work.batch / found["clock_step_s"],
        "missing": found["units_wanted"] - found["units_hit"],
        "error": found["step_s"] / expected.step_s - 1,
        "clock_error": found["clock_step_s"] / expected.step_s - 1,
        "kl_predicted": kl if kl is None or kl < float("inf") else None,
        "within_limits": keeps_quality(candidate, floor), **found,
    }  # fmt: skip


def name_of(candidate: Candidate) -> Row:
    """Which setting it is."""
    policy, plan = candidate.policy, candidate.plan
    return {
        "fields": fields_of(policy), "group_tokens": plan.group_tokens,
        "selected_tokens": candidate.selected_tokens, "capacity_tokens": candidate.capacity_tokens,
        "rank": policy.rank, "index_bits": policy.index_bits,
    }  # fmt: skip


def short_name(row: Row) -> str:
    """A setting as tables and figures call it: "G=4 MG=400 C=800 r=64/8"."""
    return (
        f"G={row['group_tokens']} MG={row['selected_tokens']} C={row['capacity_tokens']} "
        f"r={row['rank']}/{row['index_bits']}"
    )
