"""The ledger never gives more than its limit and forgets nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.byte_size import parse_bytes
from penstock.core.errors import BudgetError
from penstock.core.ledger import MemoryLedger, Reservation

LIMIT = 1000


def test_take_and_release() -> None:
    ledger = MemoryLedger(LIMIT)
    slots = ledger.take("slots", 600)
    with ledger.take("index", 300):
        assert (ledger.used_bytes, ledger.free_bytes) == (900, 100)
    slots.release()
    slots.release()
    assert ledger.used_bytes == 0
    report = ledger.report(full_cache_bytes=7)
    assert (report.limit_bytes, report.peak_bytes, report.full_cache_bytes) == (LIMIT, 900, 7)
    assert report.items == {}


def test_same_purpose_adds_up() -> None:
    ledger = MemoryLedger(LIMIT)
    first = ledger.take("slots", 100)
    ledger.take("slots", 50)
    assert ledger.report(0).items == {"slots": 150}
    first.release()
    assert ledger.report(0).items == {"slots": 50}


def test_a_refusal_names_what_and_how_much() -> None:
    ledger = MemoryLedger(LIMIT)
    ledger.take("index", 700)
    with pytest.raises(BudgetError, match=r"slots needs 500 B but only 300 B .* 1000 B") as caught:
        ledger.take("slots", 500)
    assert caught.value.needed_bytes == 1200
    assert ledger.used_bytes == 700
    assert ledger.peak_bytes == 700


def test_what_a_refusal_asks_for_is_enough() -> None:
    taken = (1 << 20) + 5000
    with pytest.raises(BudgetError) as caught:
        MemoryLedger(LIMIT).take("slots", taken)
    advice = re.search(r"give memory=(\S+)", str(caught.value))
    assert advice is not None
    assert MemoryLedger(parse_bytes(advice[1])).take("slots", taken).num_bytes == taken


def test_the_limit_itself_fits() -> None:
    assert MemoryLedger(LIMIT).take("all", LIMIT).num_bytes == LIMIT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=40))
def test_against_a_list(steps: list[tuple[bool, int]]) -> None:
    ledger, peak = MemoryLedger(LIMIT), 0
    held: list[Reservation] = []
    for give_back, size in steps:
        if give_back and held:
            held.pop(size % len(held)).release()
        elif sum(r.num_bytes for r in held) + size > LIMIT:
            with pytest.raises(BudgetError):
                ledger.take("x", size)
        else:
            held.append(ledger.take("x", size))
        peak = max(peak, sum(r.num_bytes for r in held))
        assert ledger.used_bytes == sum(r.num_bytes for r in held) <= LIMIT
        assert ledger.peak_bytes == peak
