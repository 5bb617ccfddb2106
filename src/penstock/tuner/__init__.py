"""What to expect before anything runs: hardware presets, a cost model, the paper's table."""
