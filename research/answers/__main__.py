"""`python -m research.answers`."""

from penstock.evaluate.entry import run_program
from research.answers.program import run

run_program(run)
