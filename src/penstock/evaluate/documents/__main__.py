"""`python -m penstock.evaluate.documents`."""

from penstock.evaluate.documents.program import run
from penstock.evaluate.entry import run_program

if __name__ == "__main__":
    run_program(run)
