"""`python -m research.clusters`."""

from penstock.evaluate.entry import run_program
from research.clusters.run import run

run_program(run)
