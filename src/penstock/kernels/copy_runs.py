"""copy_runs(): bytes that lie side by side to where each run of them goes."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native.compiled import address, kernel


def copy_runs(
    source: NDArray[np.uint8], lengths: NDArray[np.int64], targets: NDArray[np.int64]
) -> None:
    """Copy run i, `lengths[i]` bytes behind run i - 1, to the address `targets[i]`.

    Args:
        source: contiguous, as long as all runs. uint8 [sum(lengths)]
        lengths, targets: [runs]
    """
    assert int(lengths.sum()) <= len(source), "runs beyond the source"
    compiled = kernel("copy_runs")
    if compiled is None:
        copy_runs_twin(source, lengths, targets)
        return
    lengths, targets = np.ascontiguousarray(lengths), np.ascontiguousarray(targets)
    compiled(address(source), address(lengths), address(targets), len(lengths))


def copy_runs_twin(
    source: NDArray[np.uint8], lengths: NDArray[np.int64], targets: NDArray[np.int64]
) -> None:
    """The twin of the compiled copy."""
    at = address(source)
    for length, target in zip(lengths.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, at, length)
        at += length
