"""Entry points: one file per command."""
