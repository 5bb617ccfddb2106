"""The low-rank adapters that come with models: the bundled one, fetched ones, a folder's own."""

import os
from pathlib import Path

from penstock.core.errors import AdapterError
from penstock.engine.adapter import LowRankAdapter
from penstock.models.released import released_models

_BUNDLED = Path(__file__).parent / "recall"
_NAME = "adapter.safetensors"


def find_adapter(fingerprint: str, folder: str | Path = "") -> LowRankAdapter | None:
    """The adapter that lies beside a model's weights or ships with it.

    Args:
        fingerprint: of the model; an adapter that was made for another one is none.
        folder: that the model was loaded from, if it was one.
    """
    fetched = [released.folder for released in released_models().values() if released.is_fetched]
    own = [Path(folder)] if folder else []
    for place in (*own, _BUNDLED, *fetched):
        path = place / _NAME
        if os.path.exists(path):
            try:
                adapter = LowRankAdapter.load(path)
            except AdapterError:  # another file of that name
                continue
            if adapter.fingerprint == fingerprint:
                return adapter
    return None
