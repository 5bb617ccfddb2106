"""Train a model of several sittings and hold it against its card, by one command.

`python -m training.retrain training/recipes/recall-2.toml --seed 2`: every sitting from the model
of the one before, and with the next seed where a gate refuses one; another one for as long as other
questions than the card's say that something is missing; then the questions of the card and the
comparison with its answers (`training.compare`). Stopped at any moment, the same command goes on.
Exit status 0: no cell is worse than the card's; 1: some are; 3: stopped; 2: it cannot be.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.core.errors import ConfigError, PenstockError
from training.ahead import default_workers
from training.compare import Compared, cells_of, compare, report, some_are_worse
from training.gate import REFUSED
from training.recipe import Questions, Recipe, SittingPlan, read_recipe
from training.train import say

ROOT = Path(__file__).resolve().parents[1]
STOPPED = 3


class Retraining:
    """One run of a recipe, in a folder of its own."""

    def __init__(self, recipe: Recipe, folder: Path, *, device: str, workers: int) -> None:
        self._recipe, self._folder = recipe, folder
        self._common = ("--device", device, "--workers", str(workers))

    def train(self, seed: int) -> tuple[int, Path]:
        """All sittings, the further ones if they are needed.

        Args:
            seed: of the first one.

        Returns:
            The exit status, and the last model's folder if that is 0.

        Raises:
            ConfigError: every seed that was tried is refused.
        """
        recipe, model = self._recipe, None
        plans = [*recipe.sittings, *[recipe.further.sitting] * recipe.further.most]
        for number, plan in enumerate(plans):
            if number >= len(recipe.sittings):
                assert model is not None
                status, is_there = self._is_there(number, model)
                if status or is_there:
                    return status, model
            first = seed + number * recipe.seed_step
            status, model = self._sit(number + 1, plan, first, model)
            if status:
                return status, self._folder
        assert model is not None
        return 0, model

    def _is_there(self, number: int, model: Path) -> tuple[int, bool]:
        """Whether a model answers like the card's what comes late; the exit status is first.

        Args:
            number: of the sittings behind it.
        """
        asked = self._recipe.further.questions
        status, result = self.ask(model, asked, f"late-after-{number}.json")
        if status:
            return status, False
        compared = self.compare(result)
        say(f"what comes late, after {number} sittings\n{report(compared)}")
        return 0, not some_are_worse(compared)

    def _sit(
        self, number: int, plan: SittingPlan, first: int, begin: Path | None
    ) -> tuple[int, Path | None]:
        """One sitting, with the first seed that is not refused."""
        settings = self._recipe.folder / plan.settings
        for seed in range(first, first + self._recipe.tries):
            out = self._folder / f"{number}-{settings.stem}-seed-{seed}"
            if (out / "refused").exists():
                continue
            if (out / "model" / "SHA256SUMS").exists():
                return 0, out / "model"
            say(f"sitting {number}, {plan.minutes:g} minutes, seed {seed}")
            words = [str(settings), "--fit", str(plan.minutes), "--seed", str(seed)]
            words += ["--out", str(out), *self._common]
            words += ["--from", str(begin)] if begin is not None else []
            words += ["--resume"] if (out / "checkpoint.pt").exists() else []
            status = call("training.train", words)
            if status != REFUSED:
                return status, out / "model"
            (out / "refused").touch()
        raise ConfigError(
            f"the gate has refused the seeds {first} to {first + self._recipe.tries - 1}; give "
            "another --seed"
        )

    def ask(self, model: Path, asked: Questions, name: str) -> tuple[int, Path]:
        """Questions, unless they have all been answered; the exit status and the result."""
        out = self._folder / name
        if out.exists() and self._is_whole(out, asked):
            return 0, out
        words = [str(model), "--tokens", ",".join(map(str, asked.tokens)), *self._common]
        words += ["--tasks", ",".join(asked.tasks), "--samples", str(asked.samples)]
        words += ["--seed", str(asked.seed)]
        return call("training.evaluate", [*words, "--out", str(out)]), out

    def compare(self, result: Path) -> list[Compared]:
        """A result's cells beside the card's.

        Raises:
            ConfigError: a file of the card is no such result.
        """
        cells, kind = cells_of([result])
        files = [self._recipe.folder / file for file in self._recipe.card]
        return compare(cells, cells_of(files, kind)[0])

    @staticmethod
    def _is_whole(result: Path, asked: Questions) -> bool:
        cells, _ = cells_of([result])
        wanted = len(asked.tasks) * len(asked.tokens)
        return len(cells) == wanted and all(cell["asked"] == asked.samples for cell in cells)


def call(module: str, words: Sequence[str]) -> int:
    """Run a command of this folder to its end; its output is this one's.

    Ctrl-C reaches it from the terminal, SIGTERM is passed on; both end it in its own way.
    """
    process = subprocess.Popen([sys.executable, "-m", module, *words], cwd=ROOT)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if status < 0 else status


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.retrain", description=__doc__)
    add = parser.add_argument
    add("recipe", type=Path, help="TOML file, see training/recipes")
    add("--seed", type=int, help="of the first sitting, instead of the recipe's")
    add("--out", type=Path, help="folder (default training/runs/NAME-seed-SEED)")
    add("--further", type=int, metavar="N", help="further sittings at most (default: the recipe's)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    add("--workers", type=int, default=default_workers(), help="processes that make text")
    return parser.parse_args(arguments)


def retrain(args: argparse.Namespace) -> int:
    """Train, ask, compare; see the module's exit status.

    Raises:
        ConfigError: the recipe or a seed will not do.
    """
    recipe = read_recipe(args.recipe)
    if args.further is not None:
        if args.further < 0:
            raise ConfigError(f"--further {args.further} must be 0 or more")
        recipe = replace(recipe, further=replace(recipe.further, most=args.further))
    seed = recipe.seed if args.seed is None else args.seed
    folder = args.out or ROOT / "training" / "runs" / f"{recipe.name}-seed-{seed}"
    device = args.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Retraining(recipe, folder.resolve(), device=device, workers=args.workers)
    status, model = run.train(seed)
    if not status:
        status, result = run.ask(model, recipe.questions, "evaluation.json")
    if status:
        if status == STOPPED:
            say("stopped; the same command goes on")
        return status
    compared = run.compare(result)
    print(f"\nbeside the card, whose shares are in brackets\n{report(compared)}")
    say(f"model: {model}")
    return int(some_are_worse(compared))


def main(arguments: Sequence[str] | None = None) -> int:
    """Retrain, and say what happened."""
    args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return retrain(args)
    except PenstockError as error:
        say(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
