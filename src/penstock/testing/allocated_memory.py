"""allocated_bytes(): what a cache has allocated, tensors, arrays and buffers counted one by one."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from penstock.engine.device_tier.host_memory import HostMemory
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import KVFile
from penstock.storage.store import KVStore
from penstock.storage.unit_region import UnitRegion

_ELSEWHERE = (KVStore, UnitRegion, KVFile, nn.Module, HostMemory)
"""What is not in the budget: the store, the model, pinned memory beside it."""
Span = tuple[int, int]
"""Address and bytes."""


def allocated_bytes(thing: object, *packages: str) -> int:
    """Bytes of fast memory that are reachable; views of one memory count once.

    Args:
        packages: names whose objects are looked into, beside Penstock's, dataclasses and
            containers.
    """
    total, reached = 0, 0
    for start, size in sorted(_spans(thing, ("penstock", *packages), set())):
        end = start + size
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _spans(thing: Any, packages: tuple[str, ...], seen: set[int]) -> set[Span]:
    """Every tensor storage, array and buffer that is reachable."""
    if id(thing) in seen or isinstance(thing, _ELSEWHERE):
        return set()
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        return {(storage.data_ptr(), storage.nbytes())}
    if isinstance(thing, AlignedBuffer):
        return {(thing.address, thing.num_bytes)}
    if isinstance(thing, np.ndarray):
        while isinstance(thing.base, np.ndarray):
            thing = thing.base
        return {(thing.__array_interface__["data"][0], thing.nbytes)}
    children: list[Any] = []
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        children = list(thing)
    elif is_dataclass(thing):
        children = [getattr(thing, field.name) for field in fields(thing)]
    elif type(thing).__module__.split(".")[0] in packages:
        children = list(getattr(thing, "__dict__", {}).values())
    return set().union(*(_spans(child, packages, seen) for child in children))
