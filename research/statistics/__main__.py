"""`python -m research.statistics`."""

from penstock.evaluate.entry import run_program
from research.statistics.program import run

run_program(run)
