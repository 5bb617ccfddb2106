"""Rates of reading a stored document: random units with and without a key, and checking it all."""

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.file import KVFile, Ticket
from penstock.storage.open_files import Descriptors, wrap_descriptors

_WRITE_BYTES = 8 << 20
_SEQUENTIAL_BYTES = 4 << 20
_SEQUENTIAL_DEPTH = 4


def make_document(
    folder: Path, *, layers: int, unit_bytes: int, total_bytes: int, key: bytes | None
) -> int:
    """Store random units; returns bytes of all of them."""
    shape = Shape(layers, unit_bytes)
    units = max(1, total_bytes // (layers * shape.padded_bytes))
    step = max(1, _WRITE_BYTES // shape.padded_bytes)
    block = np.frombuffer(secrets.token_bytes(step * shape.padded_bytes), dtype=np.uint8)
    rows = block.reshape(step, shape.padded_bytes)
    with DocumentWriter.create(folder, shape, key=key) as writer:
        for layer in range(layers):
            for first in range(0, units, step):
                writer.append(layer, rows[: min(step, units - first)])
        writer.commit(identity={}, about={}, blobs={})
    return units * layers * shape.padded_bytes


def read_units(
    files: Sequence[KVFile], padded_bytes: int, num_units: int, *, batch: int, seconds: float,
    draw: np.random.Generator,
) -> float:  # fmt: skip
    """Bytes per second of batches of random units, layer after layer, each awaited."""
    batch = min(batch, num_units)
    buffer = AlignedBuffer(batch, padded_bytes)
    addresses = buffer.address + np.arange(batch, dtype=np.int64) * padded_bytes
    lengths = np.full(batch, padded_bytes, dtype=np.int64)
    done, turn = 0, 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        units = np.sort(draw.choice(num_units, size=batch, replace=False))
        files[turn % len(files)].submit_reads(
            units * padded_bytes, lengths, addresses, buffer.array
        ).wait()
        done, turn = done + batch * padded_bytes, turn + 1
    return done / (time.perf_counter() - start)


def read_in_order(files: Sequence[KVFile], file_bytes: int) -> float:
    """Bytes per second of reading whole files in their order, some large reads under way."""
    buffers = [AlignedBuffer(1, _SEQUENTIAL_BYTES) for _ in range(_SEQUENTIAL_DEPTH)]
    tickets: list[Ticket] = []
    start, turn, done = time.perf_counter(), 0, 0
    for file in files:
        for offset in range(0, file_bytes, _SEQUENTIAL_BYTES):
            if len(tickets) >= _SEQUENTIAL_DEPTH:
                tickets[turn - _SEQUENTIAL_DEPTH].wait()
            size = min(_SEQUENTIAL_BYTES, file_bytes - offset)
            buffer = buffers[turn % _SEQUENTIAL_DEPTH]
            tickets.append(
                file.submit_reads(
                    np.array([offset]), np.array([size]), np.array([buffer.address]), buffer.array
                )
            )
            done, turn = done + size, turn + 1
    for ticket in tickets[-_SEQUENTIAL_DEPTH:]:
        ticket.wait()
    return done / (time.perf_counter() - start)


def raw_files(folder: Path, layers: int) -> list[KVFile]:
    """The unit files themselves, unchecked, read as the store reads them."""
    direct = getattr(os, "O_DIRECT", 0)
    names = [folder / f"kv-{layer}.units" for layer in range(layers)]
    numbers = [os.open(name, os.O_RDWR | direct) for name in names]
    return wrap_descriptors(Descriptors(str(folder), numbers, direct != 0)).files


def measure_verify(
    folder: Path, *, layers: int, unit_bytes: int, total_bytes: int, rounds: int
) -> dict[str, Any]:
    """`verify` beside plain reading of the same files in order, in turns."""
    size = make_document(
        folder, layers=layers, unit_bytes=unit_bytes, total_bytes=total_bytes, key=None
    )
    plain, checked = [], []
    for _ in range(rounds):
        files = raw_files(folder, layers)
        plain.append(read_in_order(files, size // layers))
        with StoredDocument.open(folder) as stored:
            start = time.perf_counter()
            damage = stored.verify()
            checked.append(size / (time.perf_counter() - start))
            assert not damage, damage
    return {
        "layers": layers, "unit_bytes": unit_bytes, "total_bytes": size,
        "sequential_bytes_per_s": plain, "verify_bytes_per_s": checked,
    }  # fmt: skip


def measure_encryption(
    folder: Path, *, layers: int, unit_bytes: int, total_bytes: int, rounds: int, batch: int,
    seconds: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Batches of random units with and without a key, in turns; and `verify` of both."""
    draw = np.random.default_rng(seed)
    key = secrets.token_bytes(32)
    folder.mkdir(parents=True)
    keys = {"plain": None, "encrypted": key}
    for name, each in keys.items():
        make_document(
            folder / name, layers=layers, unit_bytes=unit_bytes, total_bytes=total_bytes, key=each
        )
    rates: dict[str, list[float]] = {name: [] for name in keys}
    verify: dict[str, list[float]] = {name: [] for name in keys}
    for _ in range(rounds):
        for name, each in keys.items():
            with StoredDocument.open(folder / name, key=each) as stored:
                rates[name].append(
                    read_units(
                        stored.files, stored.shape.padded_bytes, stored.num_units, batch=batch,
                        seconds=seconds, draw=draw,
                    )
                )  # fmt: skip
                start = time.perf_counter()
                damage = stored.verify()
                size = stored.num_units * stored.shape.padded_bytes * layers
                verify[name].append(size / (time.perf_counter() - start))
                assert not damage, damage
    return {
        "layers": layers, "unit_bytes": unit_bytes, "total_bytes": total_bytes, "batch": batch,
        "random_bytes_per_s": rates, "verify_bytes_per_s": verify,
    }  # fmt: skip
