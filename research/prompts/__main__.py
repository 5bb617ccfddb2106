"""`python -m research.prompts`."""

from penstock.evaluate.entry import run_program
from research.prompts.program import run

run_program(run)
