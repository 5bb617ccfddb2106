"""Synthetic clips and what can be asked about them: what happened when, how often, in which order.

A clip is a film of square frames, one a second, on plain grounds that change from scene to scene.
In some frames an event is seen: a coloured shape in one cell. Grey dots wander through all frames
and are never asked for. A cell is what becomes one visual token, so that a clip is a table of codes
and its pixels are looked up on the device (`pixel_table`). Times have three digits: a clip
begins at any second of a film of 900.

Questions are of five tasks. `what` and `when` ask for an event by its time and for a time by its
event; `often` says when a coloured shape was seen, and then how often; `order` says in which
colours a shape came, in order, and `next` which events came after one.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError

CELL = 8
"""Pixels of a cell's side."""
FIRST_S, LAST_S = 100, 999
"""Seconds of the film: what three digits can say."""
COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType({
    "red": (230, 30, 30), "green": (30, 170, 50), "blue": (50, 80, 240), "yellow": (240, 220, 40),
    "cyan": (40, 220, 230), "magenta": (230, 40, 220), "orange": (245, 140, 20),
    "violet": (130, 60, 190), "white": (250, 250, 250), "pink": (250, 160, 190),
    "brown": (140, 85, 40), "lime": (160, 245, 80),
})  # fmt: skip
SHAPES: Mapping[str, str] = MappingProxyType({
    "square": "007e7e7e7e7e7e00", "ring": "3c7ee7c3c3e77e3c", "cross": "181818ffff181818",
    "triangle": "18183c3c7e7effff", "diamond": "183c7effff7e3c18", "heart": "66ffffff7e3c1800",
    "moon": "1c3870f0f070381c", "arrow": "10307fff7f301000", "tree": "183c7e3c7eff1818",
    "house": "183c7effe7e7e7e7", "key": "6090906020302030", "cup": "00fcfffdfffc7800",
    "fish": "00387dffff7d3800", "bell": "183c3c3c7eff0018", "flag": "80f8fff880808080",
    "crown": "0099dbffffff7e00", "anchor": "1824181899db7e3c", "ladder": "427e42427e42427e",
    "wheel": "3c5a99ffff995a3c", "stairs": "03030f0f3f3fffff", "comb": "ffffaaaaaaaaaa00",
    "saw": "0010387cfe000000", "hourglass": "ff7e3c18183c7eff", "chain": "70888870110e110e",
})  # fmt: skip
"""Rows of eight pixels, from the top, in hexadecimal; spaces mean nothing."""
GROUNDS = ((12, 12, 16), (16, 24, 48), (16, 40, 24), (48, 20, 24))
_GREYS = ((90, 90, 90), (120, 120, 120), (150, 150, 150))
_DOT = "003c7e7e7e7e3c00"
_SCENE_FRAMES = (8, 40)
_MOST_AGAIN, _ANSWERED_NEXT = 4, 3
TASKS = ("what", "when", "often", "order", "next")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """How many colours and shapes there are; a smaller world is sooner learnt."""

    colours: int
    shapes: int

    def __post_init__(self) -> None:
        if not 2 <= self.colours <= len(COLOURS) or not 2 <= self.shapes <= len(SHAPES):
            raise ConfigError(
                f"cast.colours must be 2 to {len(COLOURS)} and cast.shapes 2 to {len(SHAPES)}"
            )

    @property
    def objects(self) -> int:
        """What can be in a cell: nothing, a coloured shape, or a dot."""
        return 1 + self.colours * self.shapes + len(_GREYS)


@dataclass(frozen=True, slots=True)
class Event:
    """A coloured shape that is seen in one frame."""

    time: int
    """Second of the film."""
    colour: int
    shape: int


@dataclass(frozen=True, slots=True)
class Clip:
    """A film's part, and what happens in it."""

    codes: NDArray[np.uint16]
    """What is in each cell: a row of `pixel_table`. [frames, side * side]"""
    first: int
    """Second of the first frame."""
    events: tuple[Event, ...]
    """In order of time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its answer, words separated by blanks."""

    task: str
    question: str
    answer: str


def pixel_table(cast: Cast) -> NDArray[np.uint8]:
    """RGB pixels of every code; [codes, CELL, CELL, 3]."""
    colours = list(COLOURS.values())[: cast.colours]
    shapes = list(SHAPES.values())[: cast.shapes]
    painted = [(_bits(shape), colour) for colour in colours for shape in shapes]
    painted += [(_bits(_DOT), grey) for grey in _GREYS]
    table = np.empty((len(GROUNDS), cast.objects, CELL, CELL, 3), dtype=np.uint8)
    table[:] = np.array(GROUNDS, dtype=np.uint8)[:, None, None, None]
    for number, (bits, colour) in enumerate(painted, 1):
        table[:, number, bits] = colour
    return table.reshape(-1, CELL, CELL, 3)


def draw_clip(frames: int, side: int, cast: Cast, rng: random.Random) -> Clip:
    """A clip of so many frames of `side` x `side` cells.

    Raises:
        ConfigError: there are more frames than seconds, or fewer than two.
    """
    if not 2 <= frames <= LAST_S + 1 - FIRST_S:
        raise ConfigError(f"clips of {frames} frames: it must be 2 to {LAST_S + 1 - FIRST_S}")
    draw = np.random.default_rng(rng.getrandbits(64))
    first = rng.randint(FIRST_S, LAST_S + 1 - frames)
    objects = np.zeros((frames, side * side), dtype=np.int64)
    for _ in range(rng.randint(0, min(2, side - 1))):
        grey = cast.objects - 1 - rng.randrange(len(_GREYS))
        objects[np.arange(frames), _wander(frames, side, draw)] = grey
    events = _draw_events(frames, first, cast, rng)
    for event in events:
        where = rng.randrange(side * side)
        objects[event.time - first, where] = 1 + event.colour * cast.shapes + event.shape
    grounds = np.empty(frames, dtype=np.int64)
    at = 0
    while at < frames:
        length = rng.randint(*_SCENE_FRAMES)
        grounds[at : at + length] = rng.randrange(len(GROUNDS))
        at += length
    codes = grounds[:, None] * cast.objects + objects
    return Clip(codes.astype(np.uint16), first, tuple(events))


def _wander(frames: int, side: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Cells of a dot that goes straight on and bounces off the edges. [frames]"""
    start = draw.uniform(0, side, size=2)
    speed = draw.uniform(-1.5, 1.5, size=2)
    path = np.abs((start + np.arange(frames)[:, None] * speed + side) % (2 * side) - side)
    row, column = np.minimum(path.astype(np.int64), side - 1).T
    cells: NDArray[np.int64] = row * side + column
    return cells


def _draw_events(frames: int, first: int, cast: Cast, rng: random.Random) -> list[Event]:
    """Events in frames of their own; a shape comes once, again in its colour, or in others."""
    count = max(1, min(frames, int(frames * rng.uniform(0.2, 0.8))))
    kinds: list[tuple[int, int]] = []
    shapes = rng.sample(range(cast.shapes), cast.shapes)
    while shapes and len(kinds) < count:
        shape = shapes.pop()
        most = min(_MOST_AGAIN, count - len(kinds))
        times = rng.randint(min(2, most), most)
        how = rng.random()
        if how < 0.3:  # singles: as many colours as there are times
            kinds += [(one, shape) for one in rng.sample(range(cast.colours), min(times, 2))]
        elif how < 0.65:
            kinds += [(rng.randrange(cast.colours), shape)] * times
        else:
            kinds += [(one, shape) for one in rng.choices(range(cast.colours), k=times)]
    rng.shuffle(kinds)
    at = sorted(rng.sample(range(frames), len(kinds)))
    return [Event(first + when, *kind) for when, kind in zip(at, kinds, strict=True)]


class Examiner:
    """Asks about one clip.

    Args:
        clip: the clip.
        cast: its world.
        rng: chooses among what can be asked.
    """

    def __init__(self, clip: Clip, cast: Cast, rng: random.Random) -> None:
        self._events, self._rng = clip.events, rng
        self._colours = list(COLOURS)[: cast.colours]
        self._shapes = list(SHAPES)[: cast.shapes]
        by_kind: dict[tuple[int, int], list[Event]] = defaultdict(list)
        by_shape: dict[int, list[Event]] = defaultdict(list)
        for event in clip.events:
            by_kind[event.colour, event.shape].append(event)
            by_shape[event.shape].append(event)
        single = [same[0] for same in by_kind.values() if len(same) == 1]
        last = clip.events[-1].time
        self._left: dict[str, list[Callable[[], Asked]]] = {
            "what": [self._bind(self._what, event) for event in clip.events],
            "when": [self._bind(self._when, event) for event in single],
            "often": [self._bind(self._often, same) for same in by_kind.values()],
            "order": [self._bind(self._order, same) for same in by_shape.values() if len(same) > 1],
            "next": [self._bind(self._next, event) for event in single if event.time < last],
        }
        for questions in self._left.values():
            rng.shuffle(questions)

    def ask(self, mix: Mapping[str, float]) -> Asked | None:
        """A question of a task drawn from a mix, not asked before; None: there is none left."""
        tasks = [task for task, share in mix.items() if share > 0 and self._left[task]]
        if not tasks:
            return None
        task = self._rng.choices(tasks, [mix[task] for task in tasks])[0]
        return self._left[task].pop()()

    @staticmethod
    def _bind(make: Callable[..., Asked], about: object) -> Callable[[], Asked]:
        return lambda: make(about)

    def _name(self, event: Event) -> str:
        return f"{self._colours[event.colour]} {self._shapes[event.shape]}"

    def _what(self, event: Event) -> Asked:
        return Asked("what", f"What appeared at {_digits(event)} ?", self._name(event))

    def _when(self, event: Event) -> Asked:
        return Asked("when", f"When did the {self._name(event)} appear ?", _digits(event))

    def _often(self, same: Sequence[Event]) -> Asked:
        times = " , ".join(map(_digits, same))
        question = f"How often did the {self._name(same[0])} appear ?"
        return Asked("often", question, f"{times} : {len(same)}")

    def _order(self, same: Sequence[Event]) -> Asked:
        colours = " , ".join(self._colours[event.colour] for event in same)
        shape = self._shapes[same[0].shape]
        return Asked("order", f"In which order came the colours of the {shape} ?", colours)

    def _next(self, event: Event) -> Asked:
        later = [one for one in self._events if one.time > event.time][:_ANSWERED_NEXT]
        names = " , ".join(map(self._name, later))
        return Asked("next", f"What came after the {self._name(event)} ?", names)


def _digits(event: Event) -> str:
    return " ".join(str(event.time))


def _bits(rows: str) -> NDArray[np.bool_]:
    packed = np.frombuffer(bytes.fromhex(rows.replace(" ", "")), dtype=np.uint8)
    bits: NDArray[np.bool_] = np.unpackbits(packed).reshape(CELL, CELL).astype(np.bool_)
    return bits
