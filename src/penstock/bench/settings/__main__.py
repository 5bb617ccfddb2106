"""`python -m penstock.bench.settings`."""

from penstock.bench.entry import run_program
from penstock.bench.settings.program import run

run_program(run)
