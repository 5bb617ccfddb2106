"""`python -m research.search`."""

from penstock.evaluate.entry import run_program
from research.search.speed import run

run_program(run)
