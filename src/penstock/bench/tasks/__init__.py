"""Generated long-context recall tasks in the bundled model's own format."""

from penstock.bench.tasks.recall import TASKS, make_sample
from penstock.bench.tasks.sample import Sample, score, score_any_order
from penstock.bench.tasks.words import Words

__all__ = ["TASKS", "Sample", "Words", "make_sample", "score", "score_any_order"]
