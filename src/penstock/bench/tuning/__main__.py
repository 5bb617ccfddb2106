"""`python -m penstock.bench.tuning`."""

from penstock.bench.entry import run_program
from penstock.bench.tuning.program import run

run_program(run)
