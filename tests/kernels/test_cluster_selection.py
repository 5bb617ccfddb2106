"""Tokens of the best clusters: the compiled kernels are their twins, and the twins are right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cluster_selection import (
    cluster_counts,
    cluster_counts_twin,
    cluster_tokens,
    cluster_tokens_twin,
)
from penstock.kernels.native.compiled import kernel


@settings(max_examples=35, deadline=None)
@given(st.data())
def test_compiled_and_twin_agree(data: st.DataObject) -> None:
    rows, clusters = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    room, dtype = data.draw(st.integers(1, 80)), data.draw(st.sampled_from([np.int16, np.int32]))
    end = data.draw(st.integers(0, room))
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    owners = generator.integers(-clusters, clusters, (rows, room)).astype(dtype)
    first = generator.integers(0, end + 1, rows)
    rank = generator.permuted(np.tile(np.arange(clusters), (rows, 1)), axis=1)
    counts = cluster_counts(owners, first, end, clusters)
    np.testing.assert_array_equal(counts, cluster_counts_twin(owners, first, end, clusters))
    wanted, base = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 9))
    found = cluster_tokens(owners, first, end, rank, counts, base, wanted)
    expected = cluster_tokens_twin(owners, first, end, rank, counts, base, wanted)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    ids, valid, whole = found
    assert (valid.sum(axis=1) == np.minimum(wanted, end - first)).all()
    for row in range(rows):
        taken = ids[row, valid[row]] - base
        assert (np.diff(taken) > 0).all()
        assert ((taken >= first[row]) & (taken < end)).all()
        raw = owners[row, taken].astype(np.int64)
        inside = np.bincount(np.where(raw < 0, ~raw, raw), minlength=clusters)
        # Whole ones whole, at most one other in part, and none that ranks behind it.
        assert (inside[whole[row]] == counts[row, whole[row]]).all()
        partly = ((inside > 0) & ~whole[row]).nonzero()[0]
        assert len(partly) <= 1
        if len(partly):
            place = rank[row].tolist().index(partly[0])
            assert not inside[rank[row, place + 1 :]].any()


def test_the_compiled_kernels_are_there() -> None:
    if kernel("top_units") is None:
        pytest.skip("no compiled kernels on this machine")
    assert kernel("cluster_counts") is not None
    assert kernel("cluster_tokens") is not None
