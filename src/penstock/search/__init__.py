"""Step-wise search: beams, scorers, and what a search moves between the tiers."""
