"""Compact in-memory summaries of the keys that rank units for a query."""
