"""Commands run in the tests' own process, where the bundled model stays in memory."""

from collections.abc import Iterator

import pytest

from tests.shared_weights import read_once


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    with read_once():
        yield
