"""`python -m penstock.bench.clusters`."""

from penstock.bench.clusters.program import run
from penstock.bench.entry import run_program

run_program(run)
