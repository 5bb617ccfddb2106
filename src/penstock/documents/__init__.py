"""Documents: a text is prefilled once and stored with its retrieval index, then asked for ever."""
