"""ProcessSizes: what a run takes in memory beside its cache."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.byte_size import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSizes:
    """Sizes in bytes, for the end of a run."""

    weights_bytes: int
    """Parameters and buffers of the model that are in memory, each once."""
    process_peak_bytes: int | None
    """Most memory that the process held, files of weights that it maps counted; None: unknown."""
    device_peak_bytes: int | None
    """Most memory of a GPU that tensors held; None on a CPU."""

    @classmethod
    def of(cls, model: Any) -> "ProcessSizes":
        """What the process of a model takes until now."""
        import torch

        tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
        device = torch.device(model.device)
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        return cls(
            weights_bytes=sum(_held_bytes(each) for each in tensors.values()),
            process_peak_bytes=process_peak_bytes(),
            device_peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        )

    @property
    def rows(self) -> dict[str, str]:
        """For the end table."""
        peak = []
        if self.process_peak_bytes is not None:
            peak.append(f"{format_bytes(self.process_peak_bytes)} at its peak")
        if self.device_peak_bytes is not None:
            peak.append(f"{format_bytes(self.device_peak_bytes)} on the GPU")
        rows = {"weights": format_bytes(self.weights_bytes)}
        return rows | ({"process": ", ".join(peak)} if peak else {})


def process_peak_bytes() -> int | None:
    """Most memory that this process ever held, in bytes; None where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return _windows_peak_bytes()
    # Linux would count a parent's peak here; the BSDs count in KiB as it does, and macOS in bytes.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _windows_peak_bytes() -> int | None:
    import psutil

    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)
    return None if peak is None else int(peak)


def _held_bytes(tensor: Any) -> int:
    """Bytes of a tensor's memory; those of the parts of a quantised one, and none on "meta"."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_held_bytes(part) for part in _parts(tensor))
    return 0 if tensor.device.type == "meta" else int(tensor.nbytes)


def _parts(tensor: Any) -> Iterator[Any]:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield getattr(tensor, name)
