"""KVSwap. Source: arXiv 2511.11907."""
