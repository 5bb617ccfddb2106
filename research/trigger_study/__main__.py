"""`python -m research.trigger_study`."""

from penstock.evaluate.entry import run_program
from research.trigger_study.program import run

run_program(run)
