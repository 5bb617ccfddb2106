"""Devices start at once."""

from collections.abc import Iterator

import pytest

from tests.ready_devices import ready_devices


@pytest.fixture(scope="package", autouse=True)
def _ready_devices() -> Iterator[None]:
    with ready_devices():
        yield
