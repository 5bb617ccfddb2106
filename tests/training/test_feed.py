"""The way of batches to the training: order, errors, the same numbers, nothing left behind."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import training
from training import workers
from training.checkpoint import read_vocabulary
from training.data import Batch, RowMaker
from training.feed import Feed, Packed, room_for
from training.settings import Settings, read_settings
from training.workers import BatchStream, WorkerError

VOCABULARY = read_vocabulary()
CPU = torch.device("cpu")


def toy() -> Settings:
    return read_settings(Path(training.__file__).parent / "configs" / "toy.toml")


def batches(count: int) -> Iterator[Batch]:
    maker = RowMaker(toy(), VOCABULARY)
    return (maker.batch(number) for number in range(count))


def test_what_arrives_is_the_batch() -> None:
    for batch in batches(3):
        high = replace(batch, tokens=batch.tokens + np.uint16(60_000))  # ids that need 16 bits
        packed = Packed.of(high, pin=False)
        assert packed.weight == float(batch.weights.sum())
        assert (packed.rows, packed.length) == batch.tokens.shape
        there = packed.on(CPU)
        for name in ("tokens", "positions", "places", "targets", "weights", "groups"):
            array, tensor = getattr(high, name), getattr(there, name)
            assert tensor.shape == array.shape
            assert np.array_equal(tensor.numpy(), array), name
        assert there.tokens.dtype == there.positions.dtype == torch.int32
        assert there.places.dtype == there.targets.dtype == there.groups.dtype == torch.int64
        assert there.weights.dtype == torch.float32


def test_padding_weighs_nothing_and_makes_few_shapes() -> None:
    shapes = set()
    for batch in batches(8):
        packed, plain = Packed.of(batch, pin=False, padded=True), Packed.of(batch, pin=False)
        there, count = packed.on(CPU), len(batch.places)
        assert packed.weight == plain.weight == pytest.approx(float(there.weights.sum()))
        for name in ("places", "targets", "weights", "groups"):
            tensor = getattr(there, name)
            assert len(tensor) == packed.guesses >= count
            assert torch.equal(tensor[:count], getattr(plain.on(CPU), name))
        rest = there.places[count:]
        assert not there.weights[count:].any()
        assert not there.targets[count:].any()
        assert (there.groups[count:] == -1).all()
        assert len(set(rest.tolist())) == len(rest), "no place has much to add up"
        assert 0 <= int(rest.min()) <= int(rest.max()) < batch.tokens.size
        shapes.add((packed.rows, packed.length, packed.guesses))
    assert len(shapes) <= 4
    sizes = [room_for(guesses, 1000) for guesses in (1, 998, 999, 1000)]
    assert sizes == [999, 999, 999, 1000]
    assert [room_for(guesses, 1 << 20) for guesses in (1, 1025, 2048)] == [1024, 2048, 2048]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_order_is_kept(ahead: int) -> None:
    with Feed(batches(7), pin=False, ahead=ahead) as feed:
        seen = [packed.on(CPU).tokens.numpy() for packed in feed]
    assert len(seen) == 7
    assert all(np.array_equal(a, b.tokens) for a, b in zip(seen, batches(7), strict=True))


def test_some_are_packed_before_they_are_asked_for() -> None:
    taken = []

    def watched() -> Iterator[Batch]:
        for number, batch in enumerate(batches(12)):
            taken.append(number)
            yield batch

    with Feed(watched(), pin=False, ahead=2) as feed:
        found = iter(feed)
        next(found)
        end = time.monotonic() + 30
        while len(taken) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(taken) == 4, "one was asked for, two wait, one is to be handed over"


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_is_raised_behind_what_was_sound(ahead: int) -> None:
    def failing() -> Iterator[Batch]:
        yield from batches(2)
        raise WorkerError("no more")

    with Feed(failing(), pin=False, ahead=ahead) as feed:
        found = iter(feed)
        next(found), next(found)
        with pytest.raises(WorkerError, match="no more"):
            next(found)


def test_closing_leaves_no_thread_and_no_process() -> None:
    threads = set(threading.enumerate())
    with (
        BatchStream(toy(), VOCABULARY, first=0, last=80, workers=2) as stream,
        Feed(stream, pin=False, ahead=2) as feed,
    ):
        next(iter(feed))
        assert set(threading.enumerate()) > threads
    assert set(threading.enumerate()) <= threads
    assert not multiprocessing.active_children()


def test_a_process_killed_while_it_hands_over_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch is larger than the pipe, so that it is killed with half of it written."""
    monkeypatch.setattr(workers, "_PIPE_BYTES", 1 << 14)
    large = replace(toy(), micro_batch_tokens=1 << 14)
    with (
        BatchStream(large, VOCABULARY, first=0, last=40, workers=1) as stream,
        Feed(stream, pin=False, ahead=1) as feed,
    ):
        found = iter(feed)
        next(found)
        [pipe], end = stream._pipes, time.monotonic() + 30
        while not (feed._packed.full() and pipe.poll()) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # all that waits is full, and the process writes on
        for process in stream._processes:
            process.kill()
            process.join()
        with pytest.raises(WorkerError, match="died"):
            list(found)
