"""The low-rank adapters at hand for a model: calibrated, in its folder, bundled, or fetched."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from penstock.core.errors import AdapterError
from penstock.engine.adapter import LowRankAdapter
from penstock.models.released import models_folder, released_models

Read: TypeAlias = Callable[[Path], LowRankAdapter]
NO_ADAPTER = "none"
"""In place of an adapter's file: make one from the prompt's own keys."""
_BUNDLED = Path(__file__).parent / "recall"
_NAME = "adapter.safetensors"
_FORMER = _BUNDLED / "former-adapter.safetensors"
"""Of keys as the model has them; documents were stored with it."""


def calibrated_adapter(fingerprint: str) -> Path:
    """Where the adapter lies that `penstock calibrate` makes for a model of this fingerprint."""
    return models_folder().parent / "adapters" / f"{fingerprint}.safetensors"


def find_adapter(
    fingerprint: str, folder: str | Path = "", read: Read = LowRankAdapter.load
) -> LowRankAdapter | None:
    """The first of `adapters_at_hand`; None: there is none."""
    return next(adapters_at_hand(fingerprint, folder, read), None)


def adapters_at_hand(
    fingerprint: str, folder: str | Path = "", read: Read = LowRankAdapter.load
) -> Iterator[LowRankAdapter]:
    """Adapters that a model finds by itself: the user's own first, then those that came with it.

    Args:
        fingerprint: of the model; an adapter that was made for another one is none.
        folder: that the model was loaded from, if it was one.
        read: of a file.
    """
    fetched = [released.folder for released in released_models().values() if released.is_fetched]
    own = [Path(folder)] if folder else []
    folders = [place / _NAME for place in (*own, _BUNDLED, *fetched)]
    for path in (calibrated_adapter(fingerprint), *folders, _FORMER):
        if os.path.exists(path):
            try:
                adapter = read(path)
            except AdapterError:  # another file of that name
                continue
            if adapter.fingerprint == fingerprint:
                yield adapter


def told_adapter(adapter: LowRankAdapter) -> str | None:
    """A line about an adapter that was found; None for those that belong to a shipped model."""
    path = Path(adapter.origin)
    if not adapter.origin or path.is_relative_to(_BUNDLED):
        return None
    return f"low-rank adapter of {adapter.tokens:,} calibration tokens: {path}"
