"""`python -m research.hosts`."""

from penstock.evaluate.entry import run_program
from research.hosts.program import run

run_program(run)
