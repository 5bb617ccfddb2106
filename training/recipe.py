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
    """What the finished model is asked, and by which results of the card it is judged."""

    tokens: tuple[int, ...]
    tasks: tuple[str, ...]
    samples: int
    card: tuple[str, ...]
    """Results of `training.evaluate`, from the recipe's folder."""


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
    questions: Questions
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
    sittings = [table(SittingPlan, one, "sittings") for one in plain.pop("sittings", [])]
    questions = table(Questions, plain.pop("questions", {}), "questions")
    made = {**plain, "sittings": sittings, "questions": questions, "folder": folder}
    recipe = table(Recipe, made, "the recipe")
    if not sittings or recipe.tries < 1:
        raise ConfigError("a recipe needs at least one of [[sittings]] and of tries")
    files = [*(plan.settings for plan in sittings), *questions.card]
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(f"there is no {missing[0]} from the recipe's folder")
    return recipe
