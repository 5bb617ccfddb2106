"""Plain data shared by every package; imports torch and the standard library only."""
