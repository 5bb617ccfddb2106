"""How long prompts take beside the plain model."""
