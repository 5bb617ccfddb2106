"""Labels of figures: near their dots, off each other, in the order of what they name."""

import math
import random
from itertools import pairwise

import pytest

from research.figures.label_places import LEADER, Box, leader_of, place_labels, spread


def test_a_lone_label_is_right_beside_its_dot() -> None:
    [place] = place_labels([(100.0, 50.0)], [(40.0, 10.0)], Box(0, 0, 300, 100))
    assert 100 < place.left < 112
    assert (place.right - place.left, place.top - place.bottom) == (40.0, 10.0)
    assert (place.bottom + place.top) / 2 == pytest.approx(50)


def test_at_the_edge_a_label_stays_inside() -> None:
    room = Box(0, 0, 110, 100)
    [place] = place_labels([(100.0, 50.0)], [(40.0, 10.0)], room)
    assert place.outside(room) == 0
    assert place.overlap(Box(99, 49, 101, 51)) == 0


def test_labels_keep_off_dots_labels_and_what_is_taken() -> None:
    rng = random.Random(0)
    dots = [(rng.uniform(150, 350), rng.uniform(100, 300)) for _ in range(18)]
    line = Box(100, 199, 400, 201)
    sizes = [(rng.uniform(30, 80), 11.0) for _ in dots]
    places = place_labels(dots, sizes, Box(0, 0, 500, 400), taken=[line])
    for number, place in enumerate(places):
        assert place.overlap(line) == 0
        assert all(place.overlap(other) == 0 for other in places[:number])
        assert all(place.overlap(Box(x - 4, y - 4, x + 4, y + 4)) == 0 for x, y in dots)


def test_spreading_moves_no_more_than_it_must() -> None:
    assert spread([5.0, 1.0, 9.0], 2.0) == [5.0, 1.0, 9.0]
    assert spread([5.0, 5.0], 2.0) == [4.0, 6.0]
    assert spread([5.0, 5.1, 1.0, 4.9], 1.0) == pytest.approx([5.0, 6.0, 1.0, 4.0])
    assert spread([], 1.0) == []


def test_lines_to_far_labels_cross_no_label() -> None:
    dots = [(200.0 + 14 * (n % 3), 200.0 + 14 * (n // 3)) for n in range(9)]
    places = place_labels(dots, [(60.0, 11.0)] * 9, Box(0, 0, 420, 400))
    far = 0
    for number, (dot, place) in enumerate(zip(dots, places, strict=True)):
        across, up = leader_of(dot, place)
        if math.hypot(across, up) <= LEADER:
            continue
        far += 1
        for share in (0.4, 0.6, 0.8):
            x, y = dot[0] + share * across, dot[1] + share * up
            spot = Box(x, y, x + 0.1, y + 0.1)
            assert not any(spot.overlap(p) for n, p in enumerate(places) if n != number)
    assert far > 3


def test_spreading_stays_within_bounds() -> None:
    assert spread([9.0, 9.0, 9.0], 2.0, 0.0, 10.0) == [6.0, 8.0, 10.0]
    assert spread([1.0, 0.5, 8.0], 3.0, 0.0, 10.0) == [3.0, 0.0, 8.0]


def test_spread_numbers_keep_order_and_distance() -> None:
    rng = random.Random(1)
    wanted = [rng.uniform(0, 10) for _ in range(12)]
    places = spread(wanted, 1.0)
    order = sorted(range(12), key=lambda i: wanted[i])
    assert order == sorted(range(12), key=lambda i: places[i])
    gaps = [places[b] - places[a] for a, b in pairwise(order)]
    assert min(gaps) > 1 - 1e-9
    assert sum(places) == pytest.approx(sum(wanted))
