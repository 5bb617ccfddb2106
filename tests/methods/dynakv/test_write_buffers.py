"""Who has a write buffer: against a plain count of heat."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.methods.dynakv import write_buffers
from penstock.methods.dynakv.write_buffers import WriteBuffers

CLUSTERS = st.integers(0, 7)


@settings(max_examples=60, deadline=None)
@given(
    num_buffers=st.integers(0, 4),
    lives=st.lists(st.tuples(st.sampled_from("aaaaaafrc"), CLUSTERS), min_size=10, max_size=120),
    rescale=st.sampled_from([1e100, 4.0]),
)
def test_the_coldest_gives_way(
    num_buffers: int, lives: list[tuple[str, int]], rescale: float
) -> None:
    buffers, former = WriteBuffers(num_buffers, 512), write_buffers._RESCALE
    write_buffers._RESCALE = rescale
    heat: dict[int, float] = {}
    held: list[int] = []
    half_life = 8 * max(1, num_buffers)
    try:
        for action, cluster in lives:
            if action == "a":
                heat = {c: value * 0.5 ** (1 / half_life) for c, value in heat.items()}
                heat[cluster] = heat.get(cluster, 0.0) + 1.0
                buffers.heat_up(cluster)
                coldest = min((heat[c] for c in held), default=0.0)
                gives_way = buffers.colder_than(cluster)
                if cluster in held or len(held) < num_buffers:
                    assert gives_way is None or heat[gives_way] < heat[cluster]
                elif num_buffers and heat[cluster] > coldest * (1 + 1e-9):
                    assert gives_way in held
                    assert abs(heat[gives_way] - coldest) <= 1e-9 * coldest
                    buffers.release(gives_way)
                    held.remove(gives_way)
                else:
                    assert gives_way is None or heat[gives_way] <= coldest * (1 + 1e-9)
                if cluster not in held and buffers.has_free():
                    buffers.assign(cluster)[:] = cluster
                    held.append(cluster)
            elif action == "f":
                buffers.forget(cluster)
                heat.pop(cluster, None)
                held = [c for c in held if c != cluster]
            elif action == "r":
                buffers.release(cluster)
                held = [c for c in held if c != cluster]
            elif cluster == 0:
                buffers.clear()
                heat, held = {}, []
            assert buffers.clusters() == held
            slots = buffers.slots(np.arange(9))
            assert [c for c in range(9) if slots[c] >= 0] == sorted(held)
            for c in held:
                assert buffers.rows[slots[c]].tobytes() == bytes([c]) * 512
    finally:
        write_buffers._RESCALE = former


def test_fill_puts_bytes_at_their_place() -> None:
    buffers = WriteBuffers(2, 512)
    for cluster in (5, 3):
        buffers.assign(cluster)[:] = 0
    buffers.fill(3, 100, memoryview(b"abc"))
    row = buffers.get(3)
    assert row is not None
    assert bytes(row[99:104]) == b"\0abc\0"
    other = buffers.get(5)
    assert other is not None
    assert not other.any()
