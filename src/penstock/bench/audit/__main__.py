"""`python -m penstock.bench.audit`."""

from penstock.bench.audit.program import run
from penstock.bench.entry import run_program

run_program(run)
