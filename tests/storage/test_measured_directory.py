"""Measuring a real directory leaves nothing behind and says what it measured."""

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.storage.measured_directory import measure_directory


def test_measurement(tmp_path: Path) -> None:
    shares: list[float] = []
    measured = measure_directory(
        str(tmp_path),
        file_bytes=64 << 20,
        cells=[(4096, 8), (65536, 4)],
        seconds_per_cell=0.01,
        progress=lambda share, what: shares.append(share),
    )
    assert str(tmp_path) in measured.description
    assert [(cell.request_bytes, cell.depth) for cell in measured.cells] == [(4096, 8), (65536, 4)]
    assert all(cell.bandwidth > 1e5 for cell in measured.cells)
    assert measured.write_bandwidth > 1e6
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64MiB"):
        measure_directory(str(tmp_path), file_bytes=4096)
    with pytest.raises(ConfigError, match="no directory"):
        measure_directory("/proc/nowhere", file_bytes=64 << 20)
