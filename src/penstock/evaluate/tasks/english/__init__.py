"""Generated long-context tasks in plain English, for any tokenizer."""
