"""Training of the models that come with Penstock; see README.md in this folder."""
