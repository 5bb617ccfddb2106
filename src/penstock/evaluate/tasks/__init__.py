"""Long-context tasks: generated in the bundled model's format or in English, or from files."""

from penstock.evaluate.tasks.english.registry import ENGLISH_TASKS, make_english_sample
from penstock.evaluate.tasks.grid import GridPoint, even_depths, grid
from penstock.evaluate.tasks.metrics import METRICS
from penstock.evaluate.tasks.recall import TASKS, make_sample
from penstock.evaluate.tasks.sample import Sample, judge, score, score_any_order
from penstock.evaluate.tasks.source import FileTasks, GeneratedTasks, TaskSource
from penstock.evaluate.tasks.words import Words

__all__ = [
    "ENGLISH_TASKS",
    "METRICS",
    "TASKS",
    "FileTasks",
    "GeneratedTasks",
    "GridPoint",
    "Sample",
    "TaskSource",
    "Words",
    "even_depths",
    "grid",
    "judge",
    "make_english_sample",
    "make_sample",
    "score",
    "score_any_order",
]
