"""Scoring where the bytes lie: the near-storage device, its protocol, and who scores how much."""
