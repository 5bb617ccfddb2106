"""What Penstock's cost model says of a row, with constants measured on this machine.

It is what `penstock plan` computes for machines of its table.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock.core.errors import PenstockError
from penstock.devices.profile import DeviceProfile
from penstock.evaluate.throughput import measure_disk
from penstock.models.loader import WEIGHTS
from penstock.tuner.cost_model import (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Workload,
    limit_of,
    predict,
)
from penstock.tuner.hardware import Hardware
from penstock.tuner.model_sizes import model_sizes
from penstock.tuner.step_work import make_policy

_READ_BYTES = 1 << 28
"""Larger than a processor's caches."""
_WIDTH = 2048
_OPERATIONS = 2000
_FILE_BYTES = 1 << 29
_REUSE_UNIT_S = 0.2e-6
"""Assumed: a slot's bookkeeping, which compiled kernels do here."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine for the cost model."""

    hardware: Hardware
    disk: DeviceProfile

    @property
    def figures(self) -> dict[str, Any]:
        """Plain data."""
        hardware, disk = asdict_of(self.hardware), asdict(self.disk)
        return {"hardware": hardware, "disk": disk}


def asdict_of(hardware: Hardware) -> dict[str, Any]:
    """The fields that are numbers."""
    names = [name for name in type(hardware).__slots__ if name != "source"]
    return {name: getattr(hardware, name) for name in names}


@torch.no_grad()
def measure_machine(threads: int, store: Path) -> Machine:
    """Measure bandwidths, arithmetic and the time of an operation; takes some seconds.

    Measured rates are what programs reach; the model wants peaks, of which they are a share.

    Args:
        store: a folder on the disk that caches lie on.
    """
    torch.set_num_threads(threads)
    matrix = torch.ones(_READ_BYTES // 2 // 4096, 4096, dtype=torch.bfloat16)
    vector = torch.ones(4096, dtype=torch.bfloat16)
    read_s = _best(lambda: matrix @ vector)
    square = torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)
    product_s = _best(lambda: square @ square)
    small = torch.ones(8)

    def operations() -> None:
        for _ in range(_OPERATIONS):
            small.add_(1.0)

    return Machine(
        hardware=Hardware(
            name="here", title="this machine", memory_bytes=psutil.virtual_memory().total,
            memory_bandwidth=_READ_BYTES / read_s / MEMORY_EFFICIENCY,
            flops=2 * _WIDTH**3 / product_s / (2 * COMPUTE_EFFICIENCY), link_bandwidth=0,
            launch_s=_best(operations) / _OPERATIONS, reuse_unit_s=_REUSE_UNIT_S, source={},
        ),
        disk=measure_disk(str(store), _FILE_BYTES),
    )  # fmt: skip


def planned(
    folder: Path, machine: Machine, *, context: int, keep: str, policy: str, weights: str
) -> dict[str, Any]:
    """What the cost model says of a policy; why it says nothing, where it does not."""
    try:
        sizes = replace(model_sizes(str(folder)), bits=WEIGHTS.get(weights))
        full = sizes.shape.full_cache_bytes(1, context)
        free = max(0, machine.hardware.memory_bytes - sizes.weight_bytes)
        load = Workload(
            model=sizes, hardware=machine.hardware, disk=machine.disk, context=context, batch=1,
            limit_bytes=limit_of(keep, full, free, 0),
        )  # fmt: skip
        return {
            **asdict(predict(make_policy(policy), load)), "weight_bytes": sizes.weight_bytes
        }  # fmt: skip
    except PenstockError as error:
        return {"error": str(error)}


def _best(work: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
