"""`python -m penstock.bench.search_accuracy`."""

from penstock.bench.entry import run_program
from penstock.bench.search_accuracy.program import run

run_program(run)
