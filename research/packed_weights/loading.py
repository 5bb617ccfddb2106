"""What packing a folder takes: time, and memory by the system's count."""

import threading
import time
from pathlib import Path
from typing import Any

import torch

from penstock.models.model_class import auto_class
from penstock.models.model_config import read_config
from penstock.models.packed.kept import kept_model
from penstock.models.packed.sources import PackedSource

_EVERY_S = 0.002


class PeakMemory:
    """Most anonymous memory of this process while it is open, above what was there; bytes.

    Mapped files are not in it: their pages are the system's to take back.
    """

    def __init__(self) -> None:
        self._before = self._most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        """The peak until now."""
        return self._most - self._before

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def measure(folder: Path, bits: int, cache: Path) -> dict[str, Any]:
    """Pack a folder, and open the result again."""
    source = PackedSource(
        folder=folder, config=read_config(folder, folder.name), dtype="auto", bits=bits,
        own_code=False, on_bytes=lambda what, done, total: None,
    )  # fmt: skip
    with torch.device("meta"):  # what the first load of all imports is not the packing's
        auto_class(source.config).from_config(source.config)
    start = time.perf_counter()
    with PeakMemory() as peak:
        model, _ = kept_model(source, cache)
    packing_s = time.perf_counter() - start
    size = sum(each.nbytes for each in model.parameters())
    largest = max(each.nbytes for each in model.parameters())
    del model
    start = time.perf_counter()
    with PeakMemory() as again:
        kept_model(source, cache)
    return {
        "bytes": size, "largest_bytes": largest, "peak_bytes": peak.num_bytes,
        "peak_ratio": peak.num_bytes / size, "packing_s": packing_s,
        "opening_s": time.perf_counter() - start, "opening_peak_bytes": again.num_bytes,
    }  # fmt: skip
