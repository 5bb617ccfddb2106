"""What reproduces papers, and the figures: programs on top of penstock.evaluate; see README.md."""
