"""Step-wise beam search end to end: strategies on one engine, and what a plan says of them."""
