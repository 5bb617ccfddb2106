"""Profiles: the papers' curves, and the arithmetic behind them."""

import itertools

import numpy as np
import pytest

from penstock.devices.presets import EMMC, NVME, PRESETS, UFS
from penstock.devices.profile import DeviceProfile

PLAIN = DeviceProfile(
    name="plain", title="plain", bandwidth=1e9, write_bandwidth=5e8, iops=1e5, latency_s=1e-4
)


def test_time_of_one_aligned_page_is_one_request() -> None:
    assert PLAIN.read_time_s(np.array([4096]), np.array([4096])) == pytest.approx(1e-5)


def test_part_of_a_page_costs_the_page() -> None:
    page = PLAIN.read_time_s(np.array([0]), np.array([4096]))
    assert PLAIN.read_time_s(np.array([512]), np.array([512])) == pytest.approx(page)
    two = PLAIN.read_time_s(np.array([4000]), np.array([200]))  # across a border
    assert two == pytest.approx(page + 4096 / 1e9)


def test_batches_add_up() -> None:
    offsets, lengths = np.array([0, 1 << 20, 5 << 20]), np.array([4096, 65536, 1 << 20])
    singles = sum(
        PLAIN.read_time_s(offsets[i : i + 1], lengths[i : i + 1]) for i in range(len(offsets))
    )
    assert PLAIN.read_time_s(offsets, lengths) == pytest.approx(singles)


def test_writes() -> None:
    assert PLAIN.write_time_s(0, 5 * 10**8) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("profile", PRESETS.values(), ids=list(PRESETS))
def test_bandwidth_grows_with_the_request_and_reaches_the_peak(profile: DeviceProfile) -> None:
    curve = [profile.read_bandwidth(4096 << i) for i in range(12)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(curve))
    assert 0.99 * profile.bandwidth < curve[-1] <= profile.bandwidth * (1 + 1e-9)
    assert profile.source


def test_peaks_of_the_papers() -> None:
    assert (NVME.bandwidth, UFS.bandwidth, EMMC.bandwidth) == (1.8e9, 2.9e9, 250e6)


@pytest.mark.parametrize("profile", [NVME, EMMC], ids=lambda p: p.name)
def test_512_byte_reads_stay_below_6_percent(profile: DeviceProfile) -> None:
    assert profile.read_bandwidth(512) < 0.06 * profile.bandwidth


def test_ufs_is_linear_below_24_kb_and_flat_above() -> None:
    assert UFS.read_bandwidth(16384) == pytest.approx(4 * UFS.read_bandwidth(4096))
    assert UFS.read_bandwidth(24576) == pytest.approx(UFS.bandwidth)
    assert UFS.read_bandwidth(8192) == pytest.approx(UFS.bandwidth / 3)


def test_a_request_costs_as_much_as_so_many_bytes() -> None:
    assert EMMC.request_s * EMMC.bandwidth == pytest.approx(27e3, rel=0.03)


def test_steady_reads_cost_what_their_batches_cost() -> None:
    for profile in PRESETS.values():
        offsets = np.arange(100, dtype=np.int64) * 65536
        lengths = np.full(100, 4 * profile.flash_page_bytes, dtype=np.int64)
        batch_s = profile.read_time_s(offsets, lengths)
        assert profile.steady_read_time_s(100, float(lengths.sum())) == pytest.approx(batch_s)
