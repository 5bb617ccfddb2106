"""A near-storage device that misbehaves in a chosen way, for tests of its clients."""

import os
import socket
import sys
import time
from collections.abc import Iterator

from typing_extensions import override

from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.cold_keys import ScoredBlock
from penstock.methods.hillinfer.near_storage.device_process import Device, Server, main

SLOW_S = 0.3


class BadDevice(Device):
    """Sends the blocks of every score request wrongly, in the way that `HOW` says."""

    HOW = ""

    @override
    def _send_blocks(self, request: int, i: int, blocks: Iterator[ScoredBlock]) -> None:
        how, area, at = self.HOW, self.areas[i], 0
        if how == "dies":
            os._exit(7)
        if how == "late":
            self._send(request - 1, protocol.Block(0, 0, 0, 0))
        if how == "hangs":
            time.sleep(3600)
        for number, block in enumerate(blocks):
            end = at + len(block.positions)
            area.positions[at:end], area.scores[at:end] = block.positions, block.scores
            if how == "out of range":
                area.positions[at] = self.settings.max_tokens
            elif how == "negative":
                area.positions[at] = -1
            elif how == "not a number":
                area.scores[at] = float("nan")
            elif how == "infinite":
                area.scores[at] = float("inf")
            elif how == "twice in a block" and end - at > 1:
                area.positions[at + 1] = area.positions[at]
            row = block.row + self.settings.rows if how == "wrong row" else block.row
            skipped = number + 1 if how == "out of order" else number
            if how == "slow":
                time.sleep(SLOW_S)
            if how != "short":
                self._send(request, protocol.Block(skipped, row, at, end - at))
            if how == "duplicate":
                self._send(request, protocol.Block(number + 1, row, end, end - at))
                area.positions[end : 2 * end - at] = block.positions
                area.scores[end : 2 * end - at] = block.scores
            at = end
        if how == "unasked":
            self._send(request, protocol.Logits(i))


class BadServer(Server):
    """Sends bytes that are no message, where `HOW` says so."""

    HOW = ""

    @override
    def send(self, connection: socket.socket, request: int, message: protocol.Message) -> None:
        data = protocol.pack(request, message)
        if isinstance(message, protocol.Block | protocol.Logits):
            if self.HOW == "garbage":
                data = b"\x00" * len(data)
            elif self.HOW == "another version":
                data = data[:4] + b"\xff\xff" + data[6:]
            elif self.HOW == "unknown kind":
                data = data[:6] + b"\xff\xff" + data[8:]
            elif self.HOW == "too long":
                data = data[:16] + b"\xff\xff\xff\x7f" + data[20:]
            elif self.HOW == "cut short":
                data = data[:10]
        connection.sendall(data)
        if len(data) == 10:
            os._exit(0)


if __name__ == "__main__":
    BadDevice.HOW = BadServer.HOW = sys.argv[1]
    import penstock.methods.hillinfer.near_storage.device_process as process

    process.Device = BadDevice  # type: ignore[misc]
    sys.exit(main(sys.argv[2:], BadServer))
