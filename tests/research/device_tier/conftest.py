"""Rows warm up in few steps: on a CPU there is no graph to record."""

import pytest

from research.device_tier import decode_row


@pytest.fixture(autouse=True)
def _soon_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_row, "WARM_UP", decode_row.WARM_AGAIN + 1)
