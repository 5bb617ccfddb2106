"""What search is good for: pointer chasing with a verifier, accuracy against number of beams."""
