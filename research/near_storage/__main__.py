"""`python -m research.near_storage`."""

from penstock.evaluate.entry import run_program
from research.near_storage.program import run

run_program(run)
