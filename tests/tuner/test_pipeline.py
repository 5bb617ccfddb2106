"""The pipeline's arithmetic, against a clock that ticks through a host and a device."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.tuner.pipeline import QUERY_SHARE, LayerTimes, step_time

TICK = 1e-3


def layer(block: float, rank: float, io: float, *, predicted: bool = True) -> LayerTimes:
    """In ticks."""
    return LayerTimes(
        block_s=block * TICK, rank_s=rank * TICK, io_s=io * TICK, is_predicted=predicted
    )


def program(layers: Sequence[LayerTimes]) -> list[tuple[str, int, int]]:
    """What the host does in a step, in order: ("work", ticks, 0), ("read", layer, ticks) or
    ("await", layer, 0). The block is written out as in section 3.4: predict the next layer from
    this one's input, project, (rank this layer's true query), attend, feed forward."""
    out: list[tuple[str, int, int]] = []

    def ticks(seconds: float) -> int:
        assert abs(seconds / TICK - round(seconds / TICK)) < 1e-6, "the test counts whole ticks"
        return round(seconds / TICK)

    def rank(number: int) -> None:
        out.append(("work", ticks(layers[number].rank_s), 0))
        out.append(("read", number, ticks(layers[number].io_s)))

    for number, each in enumerate(layers):
        following = number + 1
        if following < len(layers) and layers[following].is_predicted:
            rank(following)
        before = ticks(QUERY_SHARE * each.block_s)
        out.append(("work", before, 0))
        if number == 0 or not each.is_predicted:
            rank(number)
        out.append(("await", number, 0))
        out.append(("work", ticks(each.block_s) - before, 0))
    return out


def simulated(layers: Sequence[LayerTimes], latency: int, head: int) -> tuple[int, int]:
    """Tick by tick: a host that follows its program, a device that serves one read at a time.

    Returns:
        Ticks of the step, and those in which the host waited.
    """
    orders = deque(program(layers))
    orders.append(("work", head, 0))
    queue: deque[list[int]] = deque()  # [layer, ticks left]
    answers: dict[int, int] = {}  # layer -> tick of the answer
    asked: set[int] = set()
    clock = waited = left = 0
    while True:
        while left == 0 and orders:  # everything that takes no time
            kind, what, ticks = orders[0]
            if kind == "await" and what in asked and answers.get(what, clock + 1) > clock:
                break
            orders.popleft()
            if kind == "work":
                left = what
            elif kind == "read" and ticks:
                queue.append([what, ticks])
                asked.add(what)
        if left == 0 and not orders:
            return clock, waited
        clock += 1
        if left:
            left -= 1
        else:
            waited += 1
        if queue:
            queue[0][1] -= 1
            if queue[0][1] == 0:
                answers[queue.popleft()[0]] = clock + latency


def drawn(draw: random.Random, count: int) -> list[LayerTimes]:
    return [
        layer(
            10 * draw.randint(0, 8), draw.randint(0, 25), draw.choice([0, draw.randint(1, 90)]),
            predicted=draw.random() < 0.7,
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_as_the_clock_says(seed: int) -> None:
    draw = random.Random(seed)
    layers = drawn(draw, draw.randint(1, 9))
    latency, head = draw.choice([0, draw.randint(0, 30)]), draw.choice([0, 17])
    total, stall = step_time(layers, latency_s=latency * TICK, head_s=head * TICK)
    clock, waited = simulated(layers, latency, head)
    assert total / TICK == pytest.approx(clock, abs=1e-6)
    assert stall / TICK == pytest.approx(waited, abs=1e-6)


# Closed forms -----------------------------------------------------------------------------------


def test_without_reads_there_is_only_work() -> None:
    layers = [layer(40, 7, 0, predicted=n % 2 == 0) for n in range(5)]
    total, stall = step_time(layers, latency_s=1.0, head_s=3 * TICK)
    assert total == pytest.approx((5 * (40 + 7) + 3) * TICK)
    assert stall == 0


def test_what_fits_behind_the_layer_before_is_hidden() -> None:
    """Read i+1 has all of block i; a tick more than that is waited for in each layer."""
    for over in (0, 1):
        layers = [layer(40, 7, 0), *(layer(40, 0, 30 + over) for _ in range(4))]
        total, stall = step_time(layers, latency_s=10 * TICK)
        # The first read begins with its block, each further one behind the block's end and the
        # query of the next: 40 ticks of host, of which the last 0.3 * 40 belong to the reader.
        late = max(0, 30 + over + 10 - (40 + 12))
        assert stall == pytest.approx(4 * late * TICK)
        assert total == pytest.approx((5 * 40 + 7) * TICK + stall)
    layers = [layer(40, 0, 0), layer(40, 0, 60)]
    assert step_time(layers)[1] == pytest.approx((60 - 40 - QUERY_SHARE * 40) * TICK)


def test_nothing_is_hidden_where_every_layer_waits_for_its_query() -> None:
    layers = [layer(40, 7, 30, predicted=False) for _ in range(6)]
    total, stall = step_time(layers, latency_s=5 * TICK)
    assert stall == pytest.approx(6 * 35 * TICK)
    assert total == pytest.approx(6 * (40 + 7 + 35) * TICK)
    single = step_time(layers[:1], latency_s=5 * TICK)
    assert single == pytest.approx((82 * TICK, 35 * TICK)), "the first layer is not predicted"
    promised = step_time([replace(layers[0], is_predicted=True)], latency_s=5 * TICK)
    assert promised == pytest.approx(single)


def test_one_late_layer_waits_for_its_own_read_and_the_one_before_it_in_the_queue() -> None:
    second = [layer(0, 0, 0), *(layer(100, 0, 50) for _ in range(5))]
    assert step_time(second)[1] == pytest.approx(20 * TICK), "behind its own projections alone"
    calm = [layer(100, 2, 0), *(layer(100, 2, 20) for _ in range(5))]
    assert step_time(calm, latency_s=9 * TICK)[1] == 0
    late = [*calm[:3], replace(calm[3], is_predicted=False), *calm[4:]]
    work = 6 * (100 + 2) * TICK
    total, stall = step_time(late, latency_s=9 * TICK)
    assert stall == pytest.approx((20 + 9) * TICK)
    assert total == pytest.approx(work + stall)
    # Where the next layer's read is longer than the projections (30) and the ranking (2), the
    # late layer's own comes behind it.
    late[4] = layer(100, 2, 70)
    total, stall = step_time(late, latency_s=9 * TICK)
    assert stall == pytest.approx((70 - 30 - 2 + 20 + 9) * TICK)
    assert total == pytest.approx(work + stall)


def test_a_slow_device_sets_the_pace() -> None:
    layers = [layer(10, 1, 500) for _ in range(20)]
    total, _ = step_time(layers)
    assert total == pytest.approx(20 * 500 * TICK, rel=0.01)
    longer, _ = step_time(layers, latency_s=50 * TICK)
    assert longer - total < 3 * 50 * TICK, "the latency of one read runs beside the next one's work"


# Properties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_order(seed: int) -> None:
    draw = random.Random(1000 + seed)
    layers = drawn(draw, 6)
    latency, head = draw.randint(0, 20) * TICK, draw.randint(0, 20) * TICK
    total, stall = step_time(layers, latency_s=latency, head_s=head)
    work = sum(each.block_s + each.rank_s for each in layers)
    io = sum(each.io_s for each in layers)
    assert total == pytest.approx(work + head + stall), "a host works or waits"
    assert total >= max(work + head, io) - 1e-9
    reading = sum(each.io_s > 0 for each in layers)
    assert stall <= io + reading * latency + 1e-9
    longer: list[Callable[[LayerTimes], LayerTimes]] = [
        lambda each: replace(each, block_s=each.block_s + 7 * TICK),
        lambda each: replace(each, rank_s=each.rank_s + 7 * TICK),
        lambda each: replace(each, io_s=each.io_s + 7 * TICK if each.io_s else 0.0),
    ]
    for change in longer:
        number = draw.randrange(6)
        more = [change(each) if n == number else each for n, each in enumerate(layers)]
        assert step_time(more, latency_s=latency, head_s=head)[0] >= total - 1e-9
    assert step_time(layers, latency_s=latency + TICK, head_s=head)[0] >= total - 1e-9
    assert step_time([], head_s=head) == (head, 0.0)
