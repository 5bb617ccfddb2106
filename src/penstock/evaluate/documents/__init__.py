"""Stored documents: time to the first token behind them, and how fast they are read and checked."""
