"""`python -m research.replicas`."""

from penstock.evaluate.entry import run_program
from research.replicas.program import run

run_program(run)
