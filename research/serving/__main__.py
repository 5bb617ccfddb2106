"""`python -m research.serving`."""

from penstock.evaluate.entry import run_program
from research.serving.program import run

run_program(run)
