"""Documents between processes: readers, a second writer, kill -9 in the middle of a commit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DocumentBusyError
from penstock.storage import documents
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument, remove
from penstock.testing.document_state import read_state

SHAPE = Shape(layers=2, unit_bytes=4096)
WRITER = """
import sys
from pathlib import Path
import numpy as np
from penstock.storage.documents import DocumentWriter
with DocumentWriter.extend(Path(sys.argv[1]), key=bytes(32)) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(writer.generation + 1, 100000):
        for layer in range(2):
            writer.append(layer, np.full((3, 4096), number % 251, dtype=np.uint8))
        blobs = {"tokens": bytes([number % 251]) * 100000}
        writer.commit(identity={}, about={"number": number}, blobs=blobs)
        print(number, flush=True)
"""
READER = """
import sys
from pathlib import Path
from penstock.testing.document_state import state_of
from penstock.storage.documents import StoredDocument
with StoredDocument.open(Path(sys.argv[1]), key=bytes(32)) as document:
    print("ready", flush=True)
    sys.stdin.readline()
    print(document.generation, len(state_of(document).units[0]), flush=True)
    sys.stdin.readline()
"""
ROOT = str(Path(documents.__file__).parents[3])


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    path = ROOT + os.pathsep + os.environ.get("PYTHONPATH", "")
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def line(process: subprocess.Popen[str], send: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if send:
        process.stdin.write(send)
        process.stdin.flush()
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    """Kill it; returns the rest of what it said."""
    process.send_signal(signal.SIGKILL)
    return process.communicate(timeout=60)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "document"
    with DocumentWriter.create(made, SHAPE, key=bytes(32)) as writer:
        for layer in range(2):
            writer.append(layer, np.full((3, 4096), 1, dtype=np.uint8))
        writer.commit(identity={}, about={"number": 1}, blobs={"tokens": b"\1" * 100000})
    return made


def check(folder: Path) -> int:
    """Everything is of one commit; returns its number."""
    state = read_state(folder, key=bytes(32))
    number = int(state.about["number"])
    expected = np.arange(1, number + 1).repeat(3 * 4096) % 251
    for units in state.units:
        assert (np.frombuffer(units, np.uint8) == expected).all()
    assert state.blobs == {"tokens": bytes([number % 251]) * 100000}
    return number


def test_kill_in_the_middle_of_commits(folder: Path) -> None:
    chance = random.Random(0)
    acknowledged = 1
    for _ in range(4):
        process = start(WRITER, folder)
        try:
            assert line(process) == "ready"
            first = line(process, "go\n")
            time.sleep(chance.random() / 20)
        finally:
            said = [first, *end(process).split()]
        acknowledged = max(acknowledged, *(int(word) for word in said))
        number = check(folder)
        assert acknowledged <= number <= acknowledged + 1
        acknowledged = number
    with DocumentWriter.extend(folder, key=bytes(32)):  # the dead hold no locks
        pass
    assert (folder / "kv-0.units").stat().st_size == acknowledged * 3 * 4096
    remove(folder)


def test_two_readers_and_one_writer(folder: Path) -> None:
    processes = [start(READER, folder) for _ in range(2)]
    try:
        assert [line(process) for process in processes] == ["ready", "ready"]
        writer = start(WRITER, folder)
        processes.append(writer)
        assert line(writer) == "ready"
        with pytest.raises(DocumentBusyError, match="being written"):
            DocumentWriter.extend(folder, key=bytes(32))
        line(writer, "go\n")
        assert [line(reader, "go\n") for reader in processes[:2]] == ["1 12288", "1 12288"]
        end(writer)
        with pytest.raises(DocumentBusyError, match="in use"):
            remove(folder)
        with StoredDocument.open(folder, key=bytes(32)) as document:
            assert document.generation > 1
    finally:
        for process in processes:
            end(process)
    remove(folder)


def test_opening_while_somebody_commits(folder: Path) -> None:
    process = start(WRITER, folder)
    try:
        assert line(process) == "ready"
        line(process, "go\n")
        numbers = [check(folder)]
        while len(numbers) < 12 or numbers[-1] == numbers[0]:
            assert process.poll() is None
            numbers.append(check(folder))
    finally:
        end(process)
    assert numbers == sorted(numbers)
