"""`python -m penstock.bench.documents`."""

from penstock.bench.documents.program import run
from penstock.bench.entry import run_program

if __name__ == "__main__":
    run_program(run)
