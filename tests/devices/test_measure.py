"""Measuring a device whose speed is known finds that speed."""

import numpy as np
import pytest

from penstock.devices.measure import cells_of, fit_profile, measure_reads


class ModelDevice:
    """Takes 20 us + 1 ns a byte for a read, and 50 us once a batch."""

    def __init__(self, file_bytes: int) -> None:
        self.now = 0.0
        self.file_bytes = file_bytes
        self.places: list[tuple[int, int]] = []

    def read(self, offsets: np.ndarray, lengths: np.ndarray) -> None:
        assert (offsets % lengths == 0).all()
        assert (offsets + lengths <= self.file_bytes).all()
        self.places += zip(offsets.tolist(), lengths.tolist(), strict=True)
        self.now += 50e-6 + len(offsets) * 20e-6 + float(lengths.sum()) * 1e-9


def test_fit_finds_the_model() -> None:
    device = ModelDevice(64 << 20)
    cells = list(
        measure_reads(
            device.read, 64 << 20, cells_of(), seconds_per_cell=0, clock=lambda: device.now
        )
    )
    assert [(c.request_bytes, c.depth) for c in cells] == cells_of()
    assert all(cell.num_batches >= 5 for cell in cells)
    one = next(c for c in cells if (c.request_bytes, c.depth) == (4096, 1))
    assert one.bandwidth == pytest.approx(4096 / (50e-6 + 20e-6 + 4096e-9))
    profile = fit_profile(cells, name="model", sector_bytes=512)
    assert profile.bandwidth == pytest.approx(1e9, rel=0.02)
    assert profile.request_s == pytest.approx(20e-6, rel=0.1)
    assert profile.latency_s == pytest.approx(50e-6, rel=0.1)


def test_places_are_not_repeated_while_the_file_lasts() -> None:
    device = ModelDevice(1 << 20)
    list(measure_reads(device.read, 1 << 20, [(4096, 32)], seconds_per_cell=0))
    assert len(device.places) == len(set(device.places)) == 192  # 6 batches of 32


def test_file_smaller_than_a_batch() -> None:
    device = ModelDevice(1 << 20)
    cells = list(measure_reads(device.read, 1 << 20, [(1 << 20, 8)], seconds_per_cell=0))
    assert cells[0].bandwidth > 0


def test_the_fixed_time_of_a_fitted_profile_is_usable() -> None:
    device = ModelDevice(64 << 20)
    cells = list(
        measure_reads(
            device.read, 64 << 20, cells_of(), seconds_per_cell=0, clock=lambda: device.now
        )
    )
    profile = fit_profile(cells, name="model", sector_bytes=512)
    assert 15_000 < profile.request_s * profile.bandwidth < 25_000, "bytes in that time"
