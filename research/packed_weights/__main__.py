"""`python -m research.packed_weights`."""

from penstock.evaluate.entry import run_program
from research.packed_weights.program import run

run_program(run)
