"""`python -m research.search_accuracy`."""

from penstock.evaluate.entry import run_program
from research.search_accuracy.program import run

run_program(run)
