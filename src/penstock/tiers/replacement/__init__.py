"""Which resident unit to evict next."""
