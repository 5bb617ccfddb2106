"""A Ctrl-C at any line of a close, and at any line of an opening: nothing stays open for good."""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from penstock.engine.policy import SelectionPolicy
from penstock.methods.baselines.quest import Quest
from penstock.methods.dynakv.policy import DynaKV
from penstock.methods.hillinfer.policy import HillInfer
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.storage import open_files
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.native_aio import DESTROYER
from penstock.storage.store import KVStore
from penstock.testing.tiny_models import tiny_model
from tests.ready_devices import ready_devices

pytestmark = [
    pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks the system"),
    # What a Ctrl-C in a finalizer is to Python; what counts is that nothing stays open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHAPE = Shape(layers=2, unit_bytes=5000)
KEY = bytes(range(32))
BATCH = 8
"""Interrupts between two counts of AIO contexts."""


class Closable(Protocol):
    """What the tests ask of a thing."""

    def close(self) -> None: ...


class InterruptAt:
    """Sends this process a SIGINT before the n-th line of Python that runs in the block."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.came = False

    def __enter__(self) -> "InterruptAt":
        self._trace, self._handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._trace)
        signal.signal(signal.SIGINT, self._handler)

    def _see(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is InterruptAt.__exit__.__code__:
            return None
        if event in ("line", "call"):
            self.left -= 1
            # Where a trace function raises in an `except`, Python 3.11 never lets its frames go.
            if self.left <= 0 and sys.exc_info()[1] is None:
                self.came = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._see


def descriptors() -> list[str]:
    """What this process has open, but for what a look opens."""
    gc.collect()
    out = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            out.append(os.readlink(f"/proc/self/fd/{number}").partition("(")[0])
    return sorted(name for name in out if "/proc/" not in name and "/#" not in name) + [
        "nameless" for name in out if "/#" in name
    ]


def contexts() -> int:
    """AIO contexts of this process, once those are gone that are being given back."""
    for thread in threading.enumerate():
        if thread.name == DESTROYER:
            thread.join()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return sum("[aio]" in line for line in maps)


def read_ahead(store: KVStore) -> KVStore:
    """A store with a read under way."""
    region, buffer = store.region(0), AlignedBuffer(8, store.padded_bytes)
    region.reserve(8)
    region.write(np.arange(4), buffer, np.arange(4))
    region.submit_read(np.arange(4), buffer, np.arange(4, 8))
    return store


def make_document(folder: Path, key: bytes | None) -> Path:
    path = folder / "document"
    with DocumentWriter.create(path, SHAPE, key=key) as writer:
        for layer in range(SHAPE.layers):
            writer.append(layer, np.ones((3, SHAPE.padded_bytes), np.uint8))
        writer.commit(identity={}, about={}, blobs={"tokens": b"abc"})
    return path


def extend(path: Path, key: bytes | None) -> DocumentWriter:
    writer = DocumentWriter.extend(path, key=key)
    writer.append(0, np.ones((1, SHAPE.padded_bytes), np.uint8))
    return writer


Maker = Callable[[], Closable]


def make_store(place: str) -> KVStore:
    return KVStore.create(place, num_layers=2, unit_bytes=4096)


def documents(folder: Path, key: bytes | None) -> Iterator[tuple[str, Maker]]:
    path = make_document(folder, key)
    yield "reader", lambda: StoredDocument.open(path, key=key)
    yield "writer", lambda: extend(path, key)


def check_every_line(
    prepare: Maker, act: Callable[[Closable], object], *, first: int = 1, step: int = 1,
    most: int = 10_000,
) -> int:  # fmt: skip
    """Interrupt `act` at every `step`-th line until it ends before; returns how often that was.

    The kernel takes its time for each context: they are counted behind several lines.
    """
    prepare().close()
    before, contexts_before = descriptors(), contexts()
    for number, line in enumerate(range(first, most, step)):
        things = [prepare()]
        with contextlib.suppress(KeyboardInterrupt), InterruptAt(line) as interrupt:
            act(things[0])
        came = interrupt.came
        del interrupt
        things.clear()  # as whoever was interrupted lets go of it
        assert descriptors() == before, f"interrupted at line {line}"
        if not came or number % BATCH == BATCH - 1:
            assert contexts() == contexts_before, f"interrupted at line {line} or shortly before"
        if not came:
            return line
    raise AssertionError("it does not end")


class Nothing:
    """What is there before something is opened."""

    def close(self) -> None: ...


def close(thing: Closable) -> None:
    thing.close()


@pytest.mark.parametrize("kind", ["direct", "memory", "simulated", "threads"])
def test_store(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "threads":
        monkeypatch.setattr(open_files, "_is_on_disk", lambda _: False)
    place = {"memory": "memory", "simulated": f"nvme:{tmp_path}"}.get(kind, str(tmp_path))
    # The two that wait for the kernel run the same lines: each is interrupted at half of them.
    first, step = {"direct": (1, 26), "simulated": (14, 26)}.get(kind, (1, 13))
    assert check_every_line(
        lambda: read_ahead(make_store(place)), close, first=first, step=step
    ) > 10  # fmt: skip
    assert check_every_line(Nothing, lambda _: make_store(place).close(), step=83) > 50


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", [0, 1], ids=["reader", "writer"])
def test_document(kind: int, key: bytes | None, tmp_path: Path) -> None:
    _, make = list(documents(tmp_path, key))[kind]
    # A key changes nothing in a close: with and without it, other lines are interrupted.
    assert check_every_line(make, close, first=1 if key is None else 14, step=26) > 10
    assert check_every_line(Nothing, lambda _: make().close(), step=211) > 50


@pytest.mark.parametrize("policy", [Quest(), DynaKV(), HillInfer()], ids=lambda each: each.name)
def test_cache(policy: SelectionPolicy, tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = torch.randint(5, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    own = model.config._attn_implementation

    def make() -> Closable:
        cache = TieredCache(model, policy, None, tmp_path, max_tokens=60, must_tier=True)
        with torch.no_grad():
            for piece in (ids, ids[:, :1]):
                model(piece, **cache_argument(model, cache))
        return cache

    step = 797 if policy.name == "hillinfer" else 331  # which starts a process each time
    with ready_devices() if policy.name == "hillinfer" else contextlib.nullcontext():
        assert check_every_line(make, close, step=step) > 50
    assert model.config._attn_implementation == own
