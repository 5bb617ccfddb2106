"""`python -m research.mass`."""

from penstock.evaluate.entry import run_program
from research.mass.program import run

run_program(run)
