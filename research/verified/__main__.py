"""`python -m research.verified`."""

from penstock.evaluate.entry import run_program
from research.verified.program import run

run_program(run)
