"""`python -m penstock.bench.near_storage`."""

from penstock.bench.entry import run_program
from penstock.bench.near_storage.program import run

run_program(run)
