"""What many hosts do, by simulation from what one host measures."""
