"""The low-rank adapter that ships with the bundled model."""

from pathlib import Path

from penstock.indexes.adapter import LowRankAdapter

_PATH = Path(__file__).parent / "recall" / "adapter.safetensors"


def find_adapter(fingerprint: str) -> LowRankAdapter | None:
    """The shipped adapter, if it was made for the model with this fingerprint."""
    if not _PATH.exists():
        return None
    adapter = LowRankAdapter.load(_PATH)
    return adapter if adapter.fingerprint == fingerprint else None
