"""`python -m research.figures`."""

from penstock.evaluate.entry import run_program
from research.figures.report import run

run_program(run)
