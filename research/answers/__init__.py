"""How close settings stay to full attention's own answers."""
