"""`python -m penstock.evaluate.audit`."""

from penstock.evaluate.audit.program import run
from penstock.evaluate.entry import run_program

run_program(run)
