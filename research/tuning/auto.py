"""`python -m research.tuning.auto`: the pick of `--policy auto` beside every single policy.

For each budget and device all policies are tuned as `penstock tune --policies all` does; then the
solution of each runs again beside the others, all open and taking turns, and is held to full
attention on documents that nothing was tuned on.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.core.byte_size import parse_memory
from penstock.core.errors import ConfigError
from penstock.engine.policy import SelectionPolicy
from penstock.evaluate.entry import run_program
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import say
from penstock.methods import POLICIES
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.tuned_config import Solution, TunedConfig
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import BUNDLED
from penstock.models.model_shape import inspect_model
from penstock.tuner.engine_run import EngineRun, run_together
from penstock.tuner.fidelity import Reference
from penstock.tuner.other_policies import OtherPolicies
from penstock.tuner.solutions import config_of
from penstock.tuner.tuning_task import TuningTask
from research.tuning.setting_runs import auto_table
from research.tuning.workbench import Workbench, held_out_texts, read_tuning_options, run_bench

KIND = "tuning.auto"
Row = dict[str, Any]
Faithful = dict[str, list[tuple[float, float, SelectionPolicy]]]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.tuning auto", description=__doc__)
    add = parser.add_argument
    add("--budgets", default="1/6,1/3", help="each in place of --memory")
    add("--policies", default="all", help="names with commas")
    add("--context", type=int, default=4096, help="tokens of a sequence, its answer included")
    add("--steps", type=int, default=12, help="of a round of the last run, which has three")
    add("--texts", type=int, default=2, help="held-out documents for quality")
    add("--forced", type=int, default=32, help="tokens that are decoded at the end of each")
    args = read_tuning_options(parser, arguments, ("context", "steps", "texts", "forced"))
    if args.model != BUNDLED or args.quick:
        raise ConfigError("policies are compared by quality: --model recall, and no --quick")
    args.budgets = args.budgets.split(",")
    args.policies = list(POLICIES) if args.policies == "all" else args.policies.split(",")
    for name in args.policies:
        if name not in POLICIES:
            raise ConfigError(f"--policies: there is no {name!r}; take of {', '.join(POLICIES)}")
    return args


class AutoBench:
    """All budgets and devices of a run."""

    def __init__(self, args: argparse.Namespace, result: Result) -> None:
        """Load the model, and read the calibration and the held-out texts."""
        self._args, self._result = args, result
        args.memory = args.budgets[0]
        self._bench = Workbench(args, kind=KIND, batches=[1], contexts=[args.context])
        say("full attention over the held-out text")
        loaded = self._bench.loaded
        texts = held_out_texts(
            loaded, tokens=args.context, forced=args.forced, count=args.texts, seed=args.seed
        )
        self._held_out = Reference(loaded.model, texts, forced=args.forced)

    def run(self) -> None:
        """Measure; the result has what is finished."""
        args, found = self._args, self._result.figures
        shape = inspect_model(self._bench.loaded.model).kv
        found["cases"] = []
        for budget in args.budgets:
            full = shape.full_cache_bytes(1, args.context)
            self._bench.limit_bytes = parse_memory(budget, full, full)
            faithful: Faithful = {}
            for device in args.devices:
                found["cases"].append(self._case(budget, device, faithful))
                if args.out:
                    self._result.save(args.out)

    def forget(self) -> None:
        """Each device's journal went when it was done."""

    def _case(self, budget: str, device: str, faithful: Faithful) -> Row:
        """Tune one device, run what came out again, and hold it to full attention."""
        task = replace(self._bench.task(device), floor=self._args.floor)
        names = [name for name in self._args.policies if name != KVSwap.name]
        measured = OtherPolicies(task, self._bench.reference, faithful)
        others = list(measured.settings(names))
        search = self._bench.search(task) if KVSwap.name in self._args.policies else None
        config = config_of(
            task, search, others, measured.refused, fingerprint=fingerprint(task.model)
        )
        task.journal.remove()
        rows = self._again(task, config)
        return {
            "budget": budget, "limit_bytes": task.limit_bytes, "device": device, "rows": rows,
            "refused": measured.refused, **summary(rows),
        }  # fmt: skip

    def _again(self, task: TuningTask, config: TunedConfig) -> list[Row]:
        """Every policy's solution, run beside the others."""
        args, solutions = self._args, config.solutions
        say(f"{config.disk}: {len(solutions)} policies again, side by side")
        work = task.workpiece(1, args.context, 3 * args.steps + 8)
        runs: list[EngineRun] = []
        try:
            for each in solutions:
                policy = each.make_policy()
                run = EngineRun(work, policy, store=task.store, limit_bytes=task.limit_bytes)
                runs.append(run)
            figures = run_together(runs, steps=args.steps, rounds=3)
        finally:
            for run in runs:
                run.close()
        return [
            self._row(each, one.step_s, one.resident_bytes, one.read_bytes)
            for each, one in zip(solutions, figures, strict=True)
        ]

    def _row(self, solution: Solution, step_s: float, resident: int, read_bytes: float) -> Row:
        shape = inspect_model(self._bench.loaded.model).kv
        share = self._bench.limit_bytes / shape.full_cache_bytes(1, self._args.context)
        limit = int(share * shape.full_cache_bytes(1, self._held_out.longest))
        memory = None if solution.policy == KVSwap.name else limit
        adapter = self._bench.adapter
        held = self._held_out.measure(solution.make_policy(), memory=memory, adapter=adapter)
        return {
            "policy": solution.policy, "fields": solution.fields, "is_pick": solution.is_pick,
            "tokens_per_s": 1 / step_s, "resident_bytes": resident, "read_bytes": read_bytes,
            "kl_tuned": solution.predicted["kl"], "kl": held.kl, "agreement": held.agreement,
        }  # fmt: skip


def summary(rows: Sequence[Row]) -> Row:
    """The pick beside the fastest single policy."""
    pick = next(row for row in rows if row["is_pick"])
    best = max(rows, key=lambda row: row["tokens_per_s"])
    return {
        "pick": pick["policy"], "best": best["policy"],
        "pick_over_best": pick["tokens_per_s"] / best["tokens_per_s"],
        "pick_kl": pick["kl"], "best_kl": best["kl"],
    }  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    return run_bench(KIND, AutoBench, auto_table, arguments, args)


if __name__ == "__main__":
    run_program(run)
