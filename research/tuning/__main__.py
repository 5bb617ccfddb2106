"""`python -m research.tuning`."""

from penstock.evaluate.entry import run_program
from research.tuning.program import run

run_program(run)
