"""Hot and cold pools: which tokens are demoted, and what a step's selection is remembered as."""

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.methods.hillinfer.hot_cold import HotCold, Placement

PLACEMENTS = get_args(Placement)


def pool(
    held: list[int], *, scores: list[float] | None = None, hits: dict[int, int] | None = None,
    length: int = 100, pinned: int = 0, capacity: int | None = None, **options: Any,
) -> HotCold:  # fmt: skip
    """One row whose slots hold these tokens."""
    made = HotCold(1, length, **options)
    for token, count in (hits or {}).items():
        made.hits[0, token] = count
    made.observe(
        np.array([held], dtype=np.int32),
        None if scores is None else np.array([scores], dtype=np.float32),
        length, pinned, len(held) if capacity is None else capacity,
    )  # fmt: skip
    return made


def mask(slots: int, wanted: list[int]) -> Any:
    out = np.zeros((1, slots), dtype=np.bool_)
    out[0, wanted] = True
    return out


def taken(policy: HotCold, count: int, wanted: list[int] | None = None) -> list[int]:
    """Slots that `victims` takes, in ascending order."""
    assert policy.state is not None
    pinned = mask(policy.state.unit_in.shape[1], wanted or [])
    return sorted(policy.victims(pinned, np.array([count])).tolist())


def test_fewest_hits_go_first_then_the_lowest_score_then_the_oldest() -> None:
    hits, scores = {0: 2, 1: 1, 2: 1, 3: 1}, [0.0, 0.5, 0.25, 0.25]
    for count, first in ((1, [2]), (2, [2, 3]), (3, [1, 2, 3])):
        assert taken(pool([0, 1, 2, 3], hits=hits, scores=scores), count) == first


def test_negative_scores_are_ordered_like_any_other() -> None:
    policy = pool([0, 1, 2], scores=[-1.0, -3.0, 2.0])
    assert [taken(policy, count) for count in (1, 2)] == [[1], [0, 1]]


def test_new_tokens_go_last_and_wanted_ones_never() -> None:
    held = [10, 97, 98, 99]
    policy = pool(held, pinned=2, hits={10: 9, 97: 8})
    assert taken(policy, 2) == [0, 1]
    assert taken(policy, 3) == [0, 1, 2]
    assert taken(policy, 2, wanted=[0, 1]) == [2, 3]
    with pytest.raises(AssertionError, match="fewer unpinned"):
        taken(policy, 3, wanted=[0, 1])


def test_empty_slots_go_first_as_far_as_capacity_allows() -> None:
    held = [5, -1, 6, -1]
    assert taken(pool(held), 2) == [1, 3]
    assert taken(pool(held, capacity=3), 2) == [0, 1]
    assert taken(pool(held, capacity=2), 2) == [0, 2]


def test_what_a_step_needs_is_admitted_above_capacity() -> None:
    assert taken(pool([5, -1, 6, -1], capacity=1), 2, wanted=[0]) == [1, 2]


def test_surplus_names_what_is_above_a_capacity_that_fell() -> None:
    policy = pool([5, 6, 7, -1, 8], hits={5: 3, 6: 1, 7: 2, 8: 2}, capacity=3)
    rows, slots = policy.surplus(mask(5, [1]), np.array([1]))
    assert rows.tolist() == [0]
    assert slots.tolist() == [2]
    rows, slots = pool([5, -1]).surplus(mask(2, []), np.array([1]))
    assert len(rows) == len(slots) == 0


@pytest.mark.parametrize(
    ("placement", "first"), [("naive", 2), ("pin", 1), ("table", 0), ("both", 1)]
)
def test_each_idea_can_be_switched_off(placement: Placement, first: int) -> None:
    """Token 99 is new and low; token 10 has hits and the lowest old score; token 20 has neither."""
    scores = [0.5] * 100
    scores[10], scores[20], scores[99] = 0.2, 0.3, 0.1
    held = {0: 20, 1: 10, 2: 99}
    hits = {10: 4, 99: 4} if placement == "table" else {20: 4, 99: 9} if placement == "both" else {}
    policy = pool(
        list(held.values()), scores=scores, hits=hits, pinned=5, placement=placement, decay_steps=0
    )
    assert taken(policy, 1) == [first]


def test_selections_are_counted_and_fade() -> None:
    policy = HotCold(2, 8, decay_steps=3)
    wanted = np.array([[1, 2], [3, 3]])
    valid = np.array([[True, True], [True, False]])
    for _ in range(2):
        policy.note_selected(wanted, valid)
    assert policy.hits[0].tolist() == [0, 2, 2, 0, 0, 0, 0, 0]
    assert policy.hits[1].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    policy.note_selected(np.array([[1, 5], [3, 4]]))
    assert policy.hits[0].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert policy.hits[1].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_counts_stop_at_what_two_bytes_hold() -> None:
    policy = HotCold(1, 2, decay_steps=0)
    policy.hits[0, 1] = 65534
    for _ in range(3):
        policy.note_selected(np.array([[1]]))
        policy.note_selected(np.array([[1]]), np.array([[True]]))
    assert policy.hits[0].tolist() == [0, 65535]


def test_crop_reset_and_reorder() -> None:
    policy = HotCold(2, 4, decay_steps=5)
    policy.note_selected(np.array([[0, 3], [1, 2]]))
    swapped = policy.copy_rows(np.array([1, 0, 1]))
    assert swapped.hits.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]
    assert (swapped.steps, swapped.decay_steps) == (1, 5)
    policy.forget_from(2)
    assert policy.hits.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert swapped.hits[0].tolist() == [0, 1, 1, 0]
    policy.clear()
    assert not policy.hits.any()
    assert policy.steps == 0


def test_the_table_is_as_large_as_it_says() -> None:
    assert HotCold(3, 70).hits.nbytes == HotCold.num_bytes(3, 70) == 2 * 3 * 70


class SlowPool:
    """The same rules for one row, one slot at a time."""

    def __init__(self, length: int, placement: Placement) -> None:
        self.hits = [0] * length
        self.placement, self.length = placement, length

    def order(self, token: int, scores: list[float] | None, pinned: int) -> tuple[float, ...]:
        new = token >= self.length - pinned and self.placement in ("pin", "both")
        hits = self.hits[token] if self.placement in ("table", "both") else 0
        score = 0.0
        if scores is not None:
            score = scores[token] if token < len(scores) else float("inf")
        return (new, hits, score, token)

    def victims(
        self, held: list[int], wanted: set[int], count: int, capacity: int,
        scores: list[float] | None, pinned: int,
    ) -> list[int]:  # fmt: skip
        capacity = max(capacity, len(wanted) + count)
        empty = [slot for slot, token in enumerate(held) if token < 0]
        free = max(0, capacity - (len(held) - len(empty)))
        out = empty[: min(free, count)]
        others = [s for s, token in enumerate(held) if token >= 0 and s not in wanted]
        others.sort(key=lambda slot: self.order(held[slot], scores, pinned))
        return sorted(out + others[: count - len(out)])


SLOTS, LENGTH = 12, 40
steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=6, unique=True),
        st.integers(1, SLOTS),
        st.integers(0, 10),
        st.none() | st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 8.0]),
                             min_size=LENGTH - 2, max_size=LENGTH),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(steps=steps, placement=st.sampled_from(PLACEMENTS), decay=st.integers(0, 4))
def test_many_steps_agree_with_the_slow_twin(
    steps: list[Any], placement: Placement, decay: int
) -> None:
    """Two rows: the second wants what the first wants, mirrored, and starts half full."""
    policy = HotCold(2, LENGTH, placement=placement, decay_steps=decay)
    slow = [SlowPool(LENGTH, placement) for _ in range(2)]
    unit_in = np.full((2, SLOTS), -1, dtype=np.int32)
    unit_in[1, 3:9] = range(6)
    for number, (tokens, capacity, pinned, scores) in enumerate(steps):
        wanted = np.array([tokens, [LENGTH - 1 - token for token in tokens]])
        rows_of_scores = None if scores is None else np.array([scores, scores], dtype=np.float32)
        inside = [np.isin(unit_in[row], wanted[row]) for row in range(2)]
        needed = np.array(inside)
        missing = [[t for t in wanted[row] if t not in unit_in[row]] for row in range(2)]
        counts = np.array([len(tokens) for tokens in missing])
        policy.observe(unit_in, rows_of_scores, LENGTH, pinned, capacity)
        rows, vacated = policy.surplus(needed, counts)
        assert not needed[rows, vacated].any()
        unit_in[rows, vacated] = -1
        found = policy.victims(needed, counts)
        for row, part in enumerate(np.split(found, counts.cumsum()[:-1])):
            want = set(needed[row].nonzero()[0].tolist())
            assert not want & set(part.tolist())
            expected = slow[row].victims(
                unit_in[row].tolist(), want, int(counts[row]), capacity, scores, pinned
            )
            assert sorted(part.tolist()) == expected
            unit_in[row, part] = missing[row]
            assert (unit_in[row] >= 0).sum() <= max(capacity, len(tokens))
            for token in wanted[row]:
                slow[row].hits[token] += 1
            if decay and (number + 1) % decay == 0:
                slow[row].hits = [count // 2 for count in slow[row].hits]
        policy.note_selected(wanted)
        assert policy.hits.tolist() == [one.hits for one in slow]


@settings(deadline=None, max_examples=25)
@given(
    held=st.lists(st.integers(0, LENGTH - 1), min_size=SLOTS, max_size=SLOTS, unique=True),
    counts=st.lists(st.integers(0, 14), min_size=LENGTH, max_size=LENGTH), extra=st.integers(1, 11),
)  # fmt: skip
def test_surplus_is_what_would_go_first(held: list[int], counts: list[int], extra: int) -> None:
    policy = pool(held, hits=dict(enumerate(counts)), length=LENGTH, capacity=SLOTS - extra)
    _, slots = policy.surplus(mask(SLOTS, []), np.array([0]))
    order = sorted(range(SLOTS), key=lambda slot: (counts[held[slot]], held[slot]))
    assert sorted(slots.tolist()) == sorted(order[:extra])
