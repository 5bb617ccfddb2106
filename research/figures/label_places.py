"""Where to write labels beside dots, so that neither labels nor dots lie on each other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DIRECTIONS = 16
_DISTANCES = (7.0, 13.0, 21.0, 31.0, 43.0, 57.0, 73.0, 91.0, 111.0)
_PAD = 1.5
LEADER = 14.0
"""A label farther than this from its dot (in points) needs a line to it."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in points of 1/72 inch; y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """The area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, wide) * max(0.0, high)

    def outside(self, other: "Box") -> float:
        """The area of this one that `other` does not cover."""
        own = (self.right - self.left) * (self.top - self.bottom)
        return own - self.overlap(other)


def place_labels(
    dots: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], room: Box, *,
    dot_radius: float = 4.5, taken: Sequence[Box] = (),
) -> list[Box]:  # fmt: skip
    """Choose a place for every dot's label: the nearest free one, to the right rather than left.

    Labels are placed one after the other, so the first ones lie nearest.

    Args:
        dots: centres. [labels][x, y]
        sizes: widths and heights of the texts. [labels][width, height]
        room: what labels should not leave.
        dot_radius: labels keep off all dots by this.
        taken: what labels keep off besides.

    Returns:
        The labels' rectangles. Where nothing is free, the place that covers least. [labels]
    """
    around = [Box(x - dot_radius, y - dot_radius, x + dot_radius, y + dot_radius) for x, y in dots]
    placed: list[Box] = []
    leaders: list[Box] = []
    for dot, size in zip(dots, sizes, strict=True):
        texts = _edges([*taken, *placed])
        obstacles = np.concatenate([texts, _edges(around), _edges(leaders)])
        best, least = None, math.inf
        for place in _places(dot, size):
            wider = Box(
                place.left - _PAD, place.bottom - _PAD, place.right + _PAD, place.top + _PAD
            )
            cost = _overlaps([wider], obstacles) + 4 * wider.outside(room)
            if cost < least and (pieces := _leader_pieces(dot, place)):
                cost += 2 * _overlaps(pieces, texts)
            if cost < least - 1e-9:
                best, least = place, cost
            if least < 1e-9:
                break
        assert best is not None
        placed.append(best)
        leaders += _leader_pieces(dot, best)
    return placed


def _edges(boxes: Sequence[Box]) -> NDArray[np.float64]:
    """[boxes, 4]"""
    return np.array(
        [(box.left, box.bottom, box.right, box.top) for box in boxes], dtype=np.float64
    ).reshape(-1, 4)


def _overlaps(boxes: Sequence[Box], others: NDArray[np.float64]) -> float:
    """The areas that each of some covers of each of the others, all in all. others: [boxes, 4]"""
    left, bottom, right, top = _edges(boxes).T[:, :, None]
    wide = np.minimum(right, others[:, 2]) - np.maximum(left, others[:, 0])
    high = np.minimum(top, others[:, 3]) - np.maximum(bottom, others[:, 1])
    return float((wide.clip(0) * high.clip(0)).sum())


def leader_of(dot: tuple[float, float], place: Box) -> tuple[float, float]:
    """From a dot to the nearest point of its label: across and up, in points."""
    x, y = dot
    return (
        min(max(x, place.left), place.right) - x, min(max(y, place.bottom), place.top) - y
    )  # fmt: skip


def _leader_pieces(dot: tuple[float, float], place: Box) -> list[Box]:
    """What the line to a far label covers, as small squares; nothing for a near one."""
    across, up = leader_of(dot, place)
    length = math.hypot(across, up)
    if length <= LEADER:
        return []
    pieces = []
    for step in range(2, int(length / 3)):
        x, y = dot[0] + across * 3 * step / length, dot[1] + up * 3 * step / length
        pieces.append(Box(x - 1, y - 1, x + 1, y + 1))
    return pieces


def _places(dot: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Places around a dot, nearest first; of each ring the right one first, the left ones last."""
    x, y = dot
    width, height = size
    turns = [i // 2 if i % 2 else -i // 2 for i in range(1, _DIRECTIONS + 1)]
    for distance in _DISTANCES:
        for turn in turns:
            angle = 2 * math.pi * turn / _DIRECTIONS
            centre_x = x + (width / 2 + distance) * math.cos(angle)
            centre_y = y + (height / 2 + distance) * math.sin(angle)
            yield Box(
                centre_x - width / 2, centre_y - height / 2,
                centre_x + width / 2, centre_y + height / 2,
            )  # fmt: skip


def spread(
    wanted: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """Move numbers apart as little as needed, in their order.

    Args:
        wanted: where each would best be; equal ones keep the order in which they come.
        gap: the least distance between two.
        low: no place is below this, if there is room for all.
        high: no place is above this.

    Returns:
        The places, in the order of `wanted`. [labels]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[int]] = []
    starts: list[float] = []
    for i in order:
        groups.append([i])
        starts.append(wanted[i])
        while len(groups) > 1 and starts[-2] + gap * len(groups[-2]) > starts[-1]:
            last = groups.pop()
            starts.pop()
            groups[-1] += last
            # The mean distance of a group's members from where they want to be is zero.
            shifts = [wanted[member] - gap * n for n, member in enumerate(groups[-1])]
            starts[-1] = sum(shifts) / len(shifts)
    placed = [start + gap * n for start, group in zip(starts, groups, strict=True)
              for n in range(len(group))]  # fmt: skip
    top = len(placed) - 1
    placed = [max(place, low + gap * n) for n, place in enumerate(placed)]
    placed = [min(place, high - gap * (top - n)) for n, place in enumerate(placed)]
    places = [0.0] * len(wanted)
    for member, place in zip(order, placed, strict=True):
        places[member] = place
    return places
