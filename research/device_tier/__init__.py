"""Speed of the device tier: decoding end to end, where a step's time goes, and its kernels."""
