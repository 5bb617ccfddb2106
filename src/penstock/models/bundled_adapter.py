"""The low-rank adapters that come with the bundled model and with fetched ones."""

from pathlib import Path

from penstock.indexes.adapter import LowRankAdapter
from penstock.models.released import released_models

_BUNDLED = Path(__file__).parent / "recall"
_NAME = "adapter.safetensors"


def find_adapter(fingerprint: str) -> LowRankAdapter | None:
    """The shipped adapter, if it was made for the model with this fingerprint."""
    fetched = [released.folder for released in released_models().values() if released.is_fetched]
    for folder in (_BUNDLED, *fetched):
        path = folder / _NAME
        if path.exists():
            adapter = LowRankAdapter.load(path)
            if adapter.fingerprint == fingerprint:
                return adapter
    return None
