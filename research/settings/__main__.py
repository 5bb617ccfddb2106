"""`python -m research.settings`."""

from penstock.evaluate.entry import run_program
from research.settings.program import run

run_program(run)
