"""Recipes: what makes a model of several sittings, and what it is asked in the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from training.settings import read_table, table


@dataclass(frozen=True, kw_only=True, slots=True)
class SittingPlan:
    """One run of `training.train`."""

    settings: str
    """TOML file, from the recipe's folder."""
    minutes: float
    """Of `--fit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What a model is asked."""

    tokens: tuple[int, ...]
    tasks: tuple[str, ...]
    samples: int
    seed: int = 0
    """Of the samples; those of a card have 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Further:
    """Sittings behind the last one, for runs in which something comes late."""

    sitting: SittingPlan
    most: int
    """Of them."""
    questions: Questions
    """That tell whether one is needed. Not those of the card: a model must not be chosen by what it
    is judged by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All of it."""

    name: str
    seed: int
    """Of the first sitting."""
    seed_step: int
    """From a sitting's seed to the next one's."""
    tries: int
    """Seeds of a sitting that are begun with, the first and those after it."""
    sittings: tuple[SittingPlan, ...]
    further: Further
    questions: Questions
    """The finished model's."""
    card: tuple[str, ...]
    """Results of `training.evaluate` that it is held against, from the recipe's folder."""
    folder: Path
    """That the files are named from."""


def read_recipe(path: Path) -> Recipe:
    """Read a TOML file.

    Raises:
        ConfigError: it cannot be read, or a setting is missing, unknown or impossible.
    """
    return read_table(path, lambda content: _recipe(content, path.resolve().parent))


def _recipe(content: Mapping[str, Any], folder: Path) -> Recipe:
    plain = dict(content)
    made: dict[str, Any] = {"folder": folder}
    made["sittings"] = [table(SittingPlan, one, "sittings") for one in plain.pop("sittings", [])]
    made["questions"] = table(Questions, plain.pop("questions", {}), "questions")
    made["further"] = _further(plain.pop("further", {}))
    recipe = table(Recipe, {**plain, **made}, "the recipe")
    if not recipe.sittings or recipe.tries < 1:
        raise ConfigError("a recipe needs at least one of [[sittings]] and of tries")
    plans = [*recipe.sittings, recipe.further.sitting]
    files = [*(plan.settings for plan in plans), *recipe.card]
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(f"there is no {missing[0]} from the recipe's folder")
    return recipe


def _further(content: Mapping[str, Any]) -> Further:
    plain = dict(content)
    made = {
        "sitting": table(SittingPlan, plain.pop("sitting", {}), "further.sitting"),
        "questions": table(Questions, plain.pop("questions", {}), "further.questions"),
    }
    further = table(Further, {**plain, **made}, "further")
    if further.most < 0 or further.questions.seed == 0:
        raise ConfigError(
            "[further] needs `most` of 0 or more and questions of a seed that is not 0"
        )
    return further
