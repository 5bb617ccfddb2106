"""Token loops over a model and a TieredCache."""
