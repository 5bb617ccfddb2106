"""HTTP over an Engine: the APIs that clients of language models speak, and a page."""
