"""Devices whose memory is bounded: the same scores, no more bytes than was said, or a refusal."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import BudgetError, ConfigError, StorageError
from penstock.core.ledger import MemoryLedger
from penstock.methods.hillinfer.near_storage import protocol, shared_memory
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.methods.hillinfer.near_storage.device_memory import DeviceMemory
from penstock.methods.hillinfer.near_storage.device_process import Device
from penstock.methods.hillinfer.near_storage.scorer import Moved
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings, ScoreSettings
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.methods.hillinfer.policy import HillInfer
from penstock.storage.open_files import open_descriptors, wrap_descriptors
from penstock.testing.near_rig import NOTHING, NearRig
from tests.methods.hillinfer.test_tcp_devices import KEY, rig_of


def least_of(rig: NearRig, *, over_tcp: bool = False) -> int:
    """Bytes with which a device of the rig streams all its codes."""
    with pytest.raises(BudgetError) as refused:
        DeviceMemory.within(rig.store.devices[0].settings, 1, over_tcp=over_tcp)
    assert refused.value.needed_bytes is not None
    return refused.value.needed_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_streamed_codes_score_as_those_in_memory(bits: int, tmp_path: Path) -> None:
    hot = np.flatnonzero(np.arange(300) % 3 == 0)
    moved = Moved(hot, NOTHING, reset=False)
    with NearRig(tmp_path, bits=bits, devices=2) as whole:
        least = least_of(whole)
        with NearRig(tmp_path, bits=bits, devices=2, device_memory=least) as rig:
            for each in (whole, rig):
                each.fill()
            assert [device.coded_layers for device in rig.store.devices] == [0, 0]
            assert all(device.memory_bytes <= least for device in rig.store.devices)
            assert "codes of 1 of 1 layers are read from its disk" in rig.store.describe()
            assert "read from its disk" not in whole.store.describe()
            expected = whole.score(150)
            np.testing.assert_array_equal(rig.score(150), expected)
            np.testing.assert_array_equal(rig.score(150, moved), whole.score(150, moved))
    wide = {8: 0.06, 4: 0.6}[bits]  # 4 bits: half a step is 1/30 of a group's range
    np.testing.assert_allclose(expected, whole.expected(150), rtol=wide, atol=2e-3)
    assert np.corrcoef(expected.ravel(), whole.expected(150).ravel())[0, 1] > 0.99


def test_another_batch_is_streamed_too() -> None:
    with NearRig("memory") as whole:
        least = least_of(whole)
    with NearRig("memory", device_memory=least) as rig:
        rig.fill()
        before = rig.score(150)
        rig.store.serve(1)
        rig.store.scorer.map(0, 0, rig.units[[1]])
        rig.query, rig.rows = rig.query[[1]], 1
        np.testing.assert_array_equal(rig.score(150), before[[1]])
        with pytest.raises(StorageError, match="device_memory="):
            rig.store.serve(9)


def settings_of(layers: int, tokens: int) -> DeviceSettings:
    score = ScoreSettings(
        rows=1, max_tokens=tokens, query_heads=4, kv_heads=2, head_dim=64, dtype="float32",
        scaling=0.125, block_tokens=512,
    )  # fmt: skip
    return DeviceSettings.of(score, layers=layers, unit_bytes=1024, stripes=Stripes())


@pytest.mark.parametrize("coded", [0, 2, 5])
def test_a_device_holds_no_more_than_it_says(coded: int, tmp_path: Path) -> None:
    """As numpy counts it; buffers for reading are mapped beside it, and are in the bound too."""
    layers, tokens = 5, 4096
    settings = settings_of(layers, tokens)
    everything = DeviceMemory.within(settings, None).num_bytes
    least = DeviceMemory.within(settings, 1 << 40).num_bytes - (layers - coded) * (
        (everything - DeviceMemory.within(settings_of(0, tokens), None).num_bytes) // layers
        - 9 * tokens
    )
    held = DeviceMemory.within(settings, least)
    assert (held.coded_layers, held.bounded) == (coded, True)
    opened = open_descriptors(str(tmp_path), layers)
    descriptors, files = opened.numbers, wrap_descriptors(opened)
    memory = shared_memory.unshared(settings.division.num_bytes)
    random = np.random.default_rng(0)
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        device = Device(settings, files, memory, lambda *_: None, held, descriptors)
        step = settings.section_bytes // device.padded_bytes
        area = settings.division.area(memory, 0)
        area.query[:] = random.standard_normal(area.query.shape)
        at = settings.division.section(0)
        for layer in range(layers):
            for first in range(0, tokens, step):
                count = min(step, tokens - first)
                raw = memory[at : at + count * device.padded_bytes]
                keys = random.standard_normal((count, device.padded_bytes // 4), dtype=np.float32)
                raw[:] = keys.view(np.uint8).reshape(-1)
                del keys
                device.write(protocol.Write(
                    layer, first * device.padded_bytes, at, len(raw)
                ))  # fmt: skip
            memory[at : at + 8 * tokens].view(np.int64)[:] = np.arange(tokens)
            device.map(protocol.Map(layer, 0, tokens, at, False))
            device.score(1, protocol.Score(layer, 0, tokens, 0, 0, 0, 0, False))
        device.normalise(1, protocol.Normalise(0))
        peak = tracemalloc.get_traced_memory()[1] - begun
    finally:
        tracemalloc.stop()
        files.close()
    assert peak <= held.num_bytes + (64 << 10)  # Python's own objects
    assert peak > held.num_bytes - (4 << 20), "a bound that nothing comes near is none"


def test_a_host_streams_what_it_has_no_room_for(tmp_path: Path) -> None:
    with DeviceHost(KEY, disk=str(tmp_path)) as host, rig_of(host) as rig:
        least, disk = least_of(rig, over_tcp=True), str(tmp_path)
        rig.fill()
        expected = rig.score(150)
    with DeviceHost(KEY, disk=disk, memory_bytes=least) as host, rig_of(host) as rig:
        rig.fill()
        np.testing.assert_array_equal(rig.score(150), expected)
        assert isinstance(host.ledger, MemoryLedger)
        assert host.ledger.used_bytes == rig.store.devices[0].memory_bytes <= least
        with pytest.raises(StorageError, match="budget"):
            rig_of(host)  # what is left is too little even to stream
    with (
        DeviceHost(KEY, disk=disk, memory_bytes=10_000) as host,
        pytest.raises(StorageError, match="budget"),
    ):
        rig_of(host)


@pytest.mark.parametrize("options", [{"near": False}, {"device_memory": 0}, {"device_memory": "x"}])
def test_senseless_bounds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        HillInfer(**({"device_memory": "1MiB"} | options))  # type: ignore[arg-type]
