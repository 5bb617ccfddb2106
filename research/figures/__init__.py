"""Figures of every result, drawn from its JSON file and from nothing else."""
