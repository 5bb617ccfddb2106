"""HillInfer: hot and cold pools, scoring near the storage."""
