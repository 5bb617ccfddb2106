"""said_of(): what transformers has to say about a model folder that it cannot load, in one line."""

_OWN_CODE = "trust_remote_code"


def said_of(error: Exception) -> str:
    """The first line of an error, or that the model needs code of its own."""
    if _OWN_CODE in str(error):
        return (
            "it needs Python code of its own (auto_map in one of its JSON files), which Penstock "
            "does not run unless told to (--trust-remote-code, trust_remote_code=True); take a "
            "version of the model that transformers itself knows"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
