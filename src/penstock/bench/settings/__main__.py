"""`python -m penstock.bench.settings`."""

from penstock.bench.settings.program import main

main()
