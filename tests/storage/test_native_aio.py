"""AioQueue: many tickets, several threads, errors and interruptions; nothing may hang."""

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import FetchError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file_space import direct_sector_bytes, open_nameless
from penstock.storage.native_aio import AioQueue, AioTicket, Submission, _make_requests

BLOCK, NUM_BLOCKS = 4096, 256


@pytest.fixture
def queue() -> Iterator[AioQueue]:
    try:
        made = AioQueue(32)
    except StorageError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file whose block i starts with i."""
    opened = open_nameless(str(tmp_path), direct=True)
    if not opened.skips_cache or not direct_sector_bytes(opened.descriptor):
        pytest.skip("no direct I/O on this file system")
    blocks = AlignedBuffer(NUM_BLOCKS, BLOCK)
    blocks.array.view(np.int64)[:, 0] = np.arange(NUM_BLOCKS)
    os.pwrite(opened.descriptor, blocks.array.reshape(-1).data, 0)
    yield opened.descriptor
    os.close(opened.descriptor)


def start(
    queue: AioQueue, descriptor: int, blocks: np.ndarray, buffer: AlignedBuffer, length: int = BLOCK
) -> AioTicket:
    addresses = buffer.address + BLOCK * np.arange(len(blocks))
    lengths = np.full(len(blocks), length, dtype=np.int64)
    return queue.submit(descriptor, blocks * BLOCK, lengths, addresses, buffer.array)


def first_words(buffer: AlignedBuffer) -> list[int]:
    return [int(word) for word in buffer.array.view(np.int64)[:, 0]]


def test_tickets_waited_for_out_of_order(queue: AioQueue, descriptor: int) -> None:
    draw = np.random.default_rng(0)
    jobs = []
    for _ in range(40):
        blocks = draw.integers(0, NUM_BLOCKS, size=draw.integers(1, 50))
        buffer = AlignedBuffer(len(blocks), BLOCK)
        jobs.append((start(queue, descriptor, blocks, buffer), blocks, buffer))
    for i in draw.permutation(len(jobs)):
        ticket, blocks, buffer = jobs[i]
        ticket.wait()
        assert first_words(buffer) == blocks.tolist()
    assert queue._in_flight == 0
    assert not queue._live


def test_threads_share_a_queue(queue: AioQueue, descriptor: int) -> None:
    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        pending = []
        for step in range(150):
            blocks = draw.integers(0, NUM_BLOCKS, size=draw.integers(1, 40))
            buffer = AlignedBuffer(len(blocks), BLOCK)
            pending.append((start(queue, descriptor, blocks, buffer), blocks, buffer))
            if step % 3 == seed % 3:
                while pending:
                    ticket, wanted, got = pending.pop(draw.integers(len(pending)))
                    ticket.wait()
                    assert first_words(got) == wanted.tolist()
        for ticket, wanted, got in pending:
            ticket.wait()
            assert first_words(got) == wanted.tolist()

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, seed) for seed in range(3)]:
            future.result(timeout=240)
    assert queue._in_flight == 0


def test_two_threads_wait_for_one_ticket(queue: AioQueue, descriptor: int) -> None:
    for _ in range(50):
        buffer = AlignedBuffer(64, BLOCK)
        ticket = start(queue, descriptor, np.arange(64), buffer)
        threads = [threading.Thread(target=ticket.wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert ticket.is_complete


def test_short_read_names_the_place(queue: AioQueue, descriptor: int) -> None:
    buffer = AlignedBuffer(3, BLOCK)
    ticket = start(queue, descriptor, np.array([0, NUM_BLOCKS, 1]), buffer)
    with pytest.raises(FetchError, match=f"at {NUM_BLOCKS * BLOCK} gave only 0"):
        ticket.wait()
    assert first_words(buffer) == [0, 0, 1]


def test_read_errors_carry_their_cause(queue: AioQueue, descriptor: int) -> None:
    buffer = AlignedBuffer(2, BLOCK)
    addresses = buffer.address + np.array([0, 1 << 46])  # nobody's memory
    lengths = np.full(2, BLOCK, dtype=np.int64)
    ticket = queue.submit(descriptor, np.array([0, 0]), lengths, addresses, buffer.array)
    with pytest.raises(FetchError) as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFAULT
    after = start(queue, descriptor, np.array([5, 6]), buffer)
    after.wait()
    assert first_words(buffer) == [5, 6]


def test_closed_descriptor(queue: AioQueue, descriptor: int) -> None:
    stray = os.dup(descriptor)
    os.close(stray)
    buffer = AlignedBuffer(4, BLOCK)
    ticket = start(queue, stray, np.arange(4), buffer)
    assert ticket.done()
    with pytest.raises(FetchError) as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EBADF


def test_descriptor_closed_under_way(queue: AioQueue, descriptor: int) -> None:
    copy = os.dup(descriptor)
    buffer = AlignedBuffer(NUM_BLOCKS, BLOCK)  # more than fit in flight
    ticket = start(queue, copy, np.arange(NUM_BLOCKS), buffer)
    os.close(copy)
    with pytest.raises(FetchError):
        ticket.wait()
    assert queue._in_flight == 0


def test_closing_ends_what_is_under_way(queue: AioQueue, descriptor: int) -> None:
    buffer = AlignedBuffer(NUM_BLOCKS, BLOCK)
    ticket = start(queue, descriptor, np.arange(NUM_BLOCKS), buffer)
    queue.close()
    queue.close()
    assert ticket.done()
    with pytest.raises(FetchError, match="closed"):
        ticket.wait()
    with pytest.raises(FetchError, match="closed"):
        start(queue, descriptor, np.arange(4), buffer)


def test_closing_wakes_a_waiting_thread(queue: AioQueue, descriptor: int) -> None:
    """A wait that the kernel will never end by itself still ends when the queue is closed."""
    buffer = AlignedBuffer(1, BLOCK)
    real = start(queue, descriptor, np.arange(1), buffer)
    while not real.done():
        time.sleep(0.001)
    stuck = start(queue, descriptor, np.arange(1), buffer)
    stuck.num_outstanding += 1  # as if one more event were to come
    queue._in_flight += 1
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            stuck.wait()
        except FetchError as error:
            failures.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    queue.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert len(failures) == 2


def test_interrupted_wait_leaves_nothing_in_flight(queue: AioQueue, descriptor: int) -> None:
    buffer = AlignedBuffer(4, BLOCK)
    stuck = start(queue, descriptor, np.arange(4), buffer)
    other = start(queue, descriptor, np.arange(4), AlignedBuffer(4, BLOCK))
    stuck.num_outstanding += 1
    queue._in_flight += 1

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            stuck.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stuck.done()
    with pytest.raises(FetchError, match="interrupted"):
        stuck.wait()
    assert other.done()
    after = start(queue, descriptor, np.array([9, 8, 7, 6]), buffer)  # the queue goes on
    after.wait()
    assert first_words(buffer) == [9, 8, 7, 6]


def test_memory_outlives_a_dropped_ticket(queue: AioQueue, descriptor: int) -> None:
    for _ in range(100):
        start(queue, descriptor, np.arange(20), AlignedBuffer(20, BLOCK))
    buffer = AlignedBuffer(4, BLOCK)
    last = start(queue, descriptor, np.arange(4), buffer)
    last.wait()
    assert first_words(buffer) == [0, 1, 2, 3]
    assert not queue._live


def test_kernel_that_is_full_for_a_while(queue: AioQueue, descriptor: int) -> None:
    """EAGAIN is waited out, whether other reads are in flight or not."""
    calls, refusals = queue._calls, iter([True, True, False, True])

    def submit(context: int, count: int, pointers: int) -> int:
        if next(refusals, False):
            ctypes.set_errno(errno.EAGAIN)
            return -1
        return calls.submit(context, min(count, 2), pointers)

    queue._calls = calls._replace(submit=submit)
    buffer = AlignedBuffer(8, BLOCK)
    ticket = start(queue, descriptor, np.arange(8), buffer)
    ticket.wait()
    assert first_words(buffer) == list(range(8))


@pytest.mark.parametrize("taken", [0, 3, 5])
def test_somebody_else_submits(queue: AioQueue, descriptor: int, taken: int) -> None:
    buffer, blocks = AlignedBuffer(5, BLOCK), np.array([9, 4, 200, 31, 7])
    pause = start(queue, descriptor, np.arange(8), AlignedBuffer(8, BLOCK))

    def submit(context: int, room: int, key: int) -> Submission:
        assert room == 32 - queue._in_flight
        addresses = buffer.address + BLOCK * np.arange(5)
        lengths = np.full(5, BLOCK, dtype=np.int64)
        made = _make_requests(descriptor, blocks * BLOCK, lengths, addresses, key)
        if taken:
            pointers = made.address + 64 * 5
            assert queue._calls.submit(context, taken, pointers) == taken
        return Submission(made, taken, 0)

    ticket = queue.submit_by(submit, 5, buffer.array)
    assert (ticket.num_reads, ticket.read_bytes) == (5, 5 * BLOCK)
    ticket.wait()
    pause.wait()
    assert first_words(buffer) == blocks.tolist()
    assert (queue._in_flight, queue._live) == (0, {})


def test_somebody_else_fails(queue: AioQueue, descriptor: int) -> None:
    pause = start(queue, descriptor, np.arange(8), AlignedBuffer(8, BLOCK))

    def fail(*_: int) -> Submission:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submit_by(fail, 5, None)
    with pytest.raises(FetchError, match="given up"):
        pause.wait()
    buffer = AlignedBuffer(2, BLOCK)
    start(queue, descriptor, np.array([3, 1]), buffer).wait()
    assert first_words(buffer) == [3, 1]
    queue.close()
    with pytest.raises(FetchError, match="closed"):
        queue.submit_by(fail, 5, None)
