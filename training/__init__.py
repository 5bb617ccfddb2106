"""Training of the bundled model, from random weights; see README.md in this folder."""
