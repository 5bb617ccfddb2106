"""DynaKV: clusters that follow the decode."""
