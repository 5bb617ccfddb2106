"""`python -m research.index_study`."""

from penstock.evaluate.entry import run_program
from research.index_study.program import run

run_program(run)
