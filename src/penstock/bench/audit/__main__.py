"""`python -m penstock.bench.audit`."""

from penstock.bench.audit.program import main

main()
