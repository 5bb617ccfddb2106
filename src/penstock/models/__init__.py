"""Everything that knows about Hugging Face."""
