"""The former name of penstock.evaluate: `python -m penstock.bench.throughput` still runs."""

from penstock.evaluate import __path__ as __path__
