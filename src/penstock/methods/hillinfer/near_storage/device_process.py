"""A near-storage device as a process: owns the cold pool's files, scores keys where they lie.

Started by `NearDevice`; reads one `Configure`, then serves until its socket closes. It needs
neither torch nor the model, and ends when the cache that started it does.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import FetchError, PenstockError, StorageError
from penstock.devices.presets import PRESETS
from penstock.devices.throttle import Throttle
from penstock.kernels.native import compiled
from penstock.methods.hillinfer.near_storage import protocol, shared_memory
from penstock.methods.hillinfer.near_storage.cold_keys import UNMAPPED, ColdKeys, ScoredBlock
from penstock.methods.hillinfer.near_storage.device_memory import DeviceMemory
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings
from penstock.methods.hillinfer.near_storage.streamed_keys import BoundedKeys, KeyReader, joined
from penstock.storage.file import Int64Array, KVFile
from penstock.storage.open_files import Descriptors, FileSet, wrap_descriptors
from penstock.storage.throttled_file import ThrottledFile


class Device:
    """Files, codes and the answers to requests; knows nothing of sockets but how to send."""

    def __init__(
        self, settings: DeviceSettings, files: FileSet, memory: NDArray[np.uint8],
        send: Callable[[int, protocol.Message], None], held: DeviceMemory,
        descriptors: Sequence[int],
    ) -> None:  # fmt: skip
        """Serve these settings.

        Args:
            memory: for bulk, divided as the settings say.
            send: what answers go by.
            held: memory that may be used beside it.
            descriptors: of the files, which tell how long they are.
        """
        s = self.settings = settings
        self.files: list[KVFile] = list(files.files)
        if s.simulate:
            throttle = Throttle(PRESETS[s.simulate])
            self.files = [ThrottledFile(file, throttle) for file in self.files]
        self.memory = memory
        self.address = int(memory.__array_interface__["data"][0])
        self.areas = [s.division.area(memory, i) for i in range(shared_memory.NUM_AREAS)]
        self._reader = KeyReader(s, self.files[0].sector_bytes)
        self.padded_bytes = self._reader.padded_bytes
        self.keys = [self._make_keys(layer, held) for layer in range(s.layers)]
        self._coded = [np.zeros(k.codes.num_units, dtype=np.bool_) for k in self.keys]
        """Units of a layer whose codes this process has made. [units]"""
        self._coding = threading.Lock()  # what is written goes before what a file had
        self._bounded, self._descriptors = held.bounded, descriptors
        self._send = send
        self._scored: int = 0

    def _make_keys(self, layer: int, held: DeviceMemory) -> ColdKeys:
        if not held.bounded:
            return ColdKeys(self.settings, self.settings.units)
        units = self.settings.units if layer < held.coded_layers else 0
        return BoundedKeys(self.settings, units, self._reader, self.files[layer])

    def answer_to(self, send: Callable[[int, protocol.Message], None]) -> None:
        """Send scores that way from now on, to a cache that knows nothing of those before."""
        self._send = send

    def _piece(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        if start < 0 or num_bytes < 0 or start + num_bytes > len(self.memory):
            raise protocol.ProtocolError("a piece beyond the shared memory")
        return self.memory[start : start + num_bytes]

    def file(self, layer: int) -> KVFile:
        """The file of one layer.

        Raises:
            ProtocolError: there is none.
        """
        if not 0 <= layer < len(self.files):
            raise protocol.ProtocolError(f"layer {layer} of {len(self.files)}")
        return self.files[layer]

    # Bytes ------------------------------------------------------------------------------------

    def write(self, message: protocol.Write) -> None:
        """Write whole units, and make the codes of their keys."""
        data = self._piece(message.start, message.num_bytes)
        self.file(message.layer).write_at(message.offset, data)
        first, rest = divmod(message.offset, self.padded_bytes)
        if rest or message.num_bytes % self.padded_bytes:
            raise protocol.ProtocolError("a write that is not of whole units")
        raw = data.reshape(-1, self.padded_bytes)
        self._put(message.layer, np.arange(first, first + len(raw)), raw)

    def _put(
        self, layer: int, units: Int64Array, raw: NDArray[np.uint8], *, missing: bool = False
    ) -> None:
        """Make the codes of some units; with `missing` only of those that have none."""
        with self._coding:
            if self._bounded:  # for others there is no room
                kept = units < len(self._coded[layer])
                units, raw = units[kept], raw[kept]
            if missing:
                left = ~self._are_coded(layer, units)
                units, raw = units[left], raw[left]
            self.keys[layer].put(units, raw)
            self._are_coded(layer, units)
            self._coded[layer][units] = True

    def _are_coded(self, layer: int, units: Int64Array) -> NDArray[np.bool_]:
        coded = self._coded[layer]
        if (most := int(units.max(initial=-1)) + 1) > len(coded):
            more = np.zeros(max(most, len(coded) * 5 // 4) - len(coded), dtype=np.bool_)
            coded = self._coded[layer] = np.concatenate([coded, more])
        found: NDArray[np.bool_] = coded[units]
        return found

    def read(self, message: protocol.Read) -> None:
        """Read pieces side by side; neighbours on the disk are one read."""
        lists = self._piece(message.start, 16 * message.count).view(np.int64)
        offsets, lengths = lists[: message.count].copy(), lists[message.count :].copy()
        if (lengths <= 0).any() or (offsets < 0).any():
            raise protocol.ProtocolError("a read of nothing, or before the file")
        self._piece(message.target, int(lengths.sum()))
        begins = np.cumsum(lengths) - lengths + (self.address + message.target)
        offsets, lengths, begins = joined(offsets, lengths, begins)
        self.file(message.layer).submit_reads(offsets, lengths, begins, self.memory).wait()

    def map(self, message: protocol.Map) -> None:
        """Learn where tokens are; after a restart codes that are missing are made from the file."""
        s, keys = self.settings, self.keys[message.layer]
        if message.first < 0 or message.first + message.count > s.max_tokens:
            raise protocol.ProtocolError("tokens beyond max_tokens")
        raw = self._piece(message.start, 8 * s.rows * message.count).view(np.int64)
        units = raw.reshape(s.rows, message.count).copy()
        if (units < UNMAPPED).any():
            raise protocol.ProtocolError("a unit before the first")
        if message.encode:
            self._encode(message.layer, np.unique(units[units != UNMAPPED]))
        keys.map(message.first, units)

    def _encode(self, layer: int, units: Int64Array) -> None:
        # What is mapped and not written yet gets its codes with the write.
        size = os.fstat(self._descriptors[layer]).st_size
        units = units[units < size // self.padded_bytes]
        if self._bounded:
            units = units[units < len(self._coded[layer])]
        units = units[~self._are_coded(layer, units)]
        for places, raw in self._reader.read(self.file(layer), units):
            self._put(layer, units[places], raw, missing=True)

    # Scores -----------------------------------------------------------------------------------

    def score(self, request: int, message: protocol.Score) -> bool:
        """Begin a score request; returns whether it waits for normalisers."""
        s, keys, area = self.settings, self.keys[message.layer], self._area(message.area)
        tokens = s.rows * s.max_tokens
        if (
            max(message.end, message.first + message.count) > s.max_tokens
            or max(message.promoted, message.demoted) > tokens
            or message.count > shared_memory.MOST_NEW
        ):
            raise protocol.ProtocolError("a score request beyond max_tokens")
        promoted, demoted = area.promoted[: message.promoted], area.demoted[: message.demoted]
        for moved in (promoted, demoted):
            if len(moved) and not 0 <= int(moved.min()) <= int(moved.max()) < tokens:
                raise protocol.ProtocolError("a moved token beyond max_tokens")
        if message.count:
            units = area.units[: s.rows * message.count].reshape(s.rows, message.count)
            keys.map(message.first, units.copy())
        keys.change(promoted, demoted, reset=message.reset)
        self.keys[self._scored].forget_logits()
        if s.rule == "attention":
            area.log_sums[:] = keys.log_sums(area.query, message.end)
            self._scored = message.layer
            self._send(request, protocol.Logits(message.area))
            return True
        self._send_blocks(request, message.area, keys.blocks_of_products(area.query, message.end))
        return False

    def normalise(self, request: int, message: protocol.Normalise) -> None:
        """Send the blocks of a request whose logits are there."""
        area, keys = self._area(message.area), self.keys[self._scored]
        self._send_blocks(request, message.area, keys.blocks_of_shares(area.normalisers))

    def _area(self, i: int) -> shared_memory.Area:
        if not 0 <= i < len(self.areas):
            raise protocol.ProtocolError(f"area {i} of {len(self.areas)}")
        return self.areas[i]

    def _send_blocks(self, request: int, i: int, blocks: Iterator[ScoredBlock]) -> None:
        area, at = self.areas[i], 0
        for number, block in enumerate(blocks):
            end = at + len(block.positions)
            area.positions[at:end], area.scores[at:end] = block.positions, block.scores
            self._send(request, protocol.Block(number, block.row, at, end - at))
            at = end


def carry_out(device: Device, request: int, message: protocol.Message) -> bool:
    """Do what one request asks; returns whether another message of it will come.

    Raises:
        ProtocolError: it is no request.
        StorageError: it failed.
    """
    match message:
        case protocol.Reserve():
            device.file(message.layer).reserve(message.num_bytes)
        case protocol.Write():
            device.write(message)
        case protocol.Read():
            device.read(message)
        case protocol.Sync():
            device.file(message.layer).sync()
        case protocol.Map():
            device.map(message)
        case protocol.Score():
            return device.score(request, message)
        case protocol.Normalise():
            device.normalise(request, message)
        case _:
            raise protocol.ProtocolError(f"{type(message).__name__} is not for a device")
    return False


class Server:
    """Serves the connections, each on a thread of its own and in order."""

    def __init__(self, scores: socket.socket, others: list[socket.socket]) -> None:
        self._scores, self._others = scores, others
        self._device: Device | None = None

    def send(self, connection: socket.socket, request: int, message: protocol.Message) -> None:
        """Send one message."""
        connection.sendall(protocol.pack(request, message))

    def serve(self, memory: int) -> None:
        """Answer until the other side goes. memory: descriptor of the shared memory."""
        reader = protocol.Reader(self._scores)
        received = reader.receive()
        if received is None:
            return
        self._configure(*received, memory)
        for other in self._others:
            job = partial(self._work, other, protocol.Reader(other))
            threading.Thread(target=job, daemon=True).start()
        self._work(self._scores, reader)

    def _configure(self, request: int, message: protocol.Message, memory: int) -> None:
        if not isinstance(message, protocol.Configure):
            raise protocol.ProtocolError("the first message must be Configure")
        numbers = message.values.pop("descriptors")
        compiled.limit(message.values.pop("kernels"))
        settings = DeviceSettings.from_json(message.values)
        try:
            held = DeviceMemory.within(settings, settings.device_memory or None)
            files = _open(settings, numbers)
            bulk = shared_memory.attach(memory, settings.division.num_bytes)
            self._device = Device(
                settings, files, bulk, partial(self.send, self._scores), held, numbers
            )
        except (PenstockError, OSError) as error:
            self.send(self._scores, request, failed(error))
            raise
        first = self._device.files[0]
        self.send(self._scores, request, protocol.Ready({
            "sector_bytes": first.sector_bytes, "is_direct": first.is_direct,
            "description": files.description, "memory_bytes": held.num_bytes,
            "coded_layers": held.coded_layers,
        }))  # fmt: skip

    def _work(self, connection: socket.socket, reader: protocol.Reader) -> None:
        """Carry out the requests of one connection in their order until it ends."""
        begun = 0  # what a request in two rounds has taken already
        with contextlib.suppress(OSError):  # the other side has gone
            while (received := reader.receive()) is not None:
                request, message = received
                start = time.perf_counter_ns()
                try:
                    assert self._device is not None
                    waits = carry_out(self._device, request, message)
                    took = time.perf_counter_ns() - start + begun
                    begun = took if waits else 0
                    if waits:
                        continue  # the answer comes after the second round
                    answer: protocol.Message = protocol.Done(took)
                except Exception as error:  # whatever it is, the other side must not wait for it
                    answer = failed(error)
                self.send(connection, request, answer)


def _open(settings: DeviceSettings, numbers: list[int]) -> FileSet:
    files = wrap_descriptors(Descriptors(settings.directory, numbers, settings.direct))
    return files._replace(description="memory") if settings.in_memory else files


def failed(error: BaseException) -> protocol.Failed:
    """What an error is told the cache by."""
    kind = type(error).__name__
    if not isinstance(error, StorageError) or isinstance(error, protocol.ProtocolError):
        kind = FetchError.__name__
    return protocol.Failed({"error": kind, "message": str(error) or type(error).__name__})


def main(arguments: list[str], server: type[Server] = Server) -> int:
    """Serve on the sockets and the shared memory whose descriptors are given."""
    *connections, memory = (int(number) for number in arguments)
    scores, *others = (socket.socket(fileno=number) for number in connections)
    try:
        server(scores, others).serve(memory)
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"penstock: near-storage device: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
