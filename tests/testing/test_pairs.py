"""covering(): every two values of two parameters are met, in few combinations."""

from itertools import combinations, product

import pytest

from penstock.testing.pairs import covering


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 4, 4, 6), (2, 2, 2, 2, 2, 2), (5, 1, 2)])
def test_every_pair_is_met(sizes: tuple[int, ...]) -> None:
    found = covering(*map(range, sizes))
    for i, j in combinations(range(len(sizes)), 2):
        met = {(row[i], row[j]) for row in found}
        assert met == set(product(range(sizes[i]), range(sizes[j])))
    assert len(found) == len(set(found))
    largest, second = sorted(sizes)[:-3:-1]
    assert len(found) <= 1.5 * largest * second + 2
    assert found == covering(*map(range, sizes))
