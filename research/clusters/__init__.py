"""DynaKV's first bench: drift of generated keys, clusters by update method, reads and layout."""
