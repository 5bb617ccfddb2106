"""Near-storage devices: scores, bytes, restarts, several of them."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.kernels.native import compiled
from penstock.methods.hillinfer.near_storage.channel import ScorerError
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.protocol import ProtocolError
from penstock.methods.hillinfer.near_storage.scorer import LocalScorer, Moved
from penstock.methods.hillinfer.near_storage.settings import DeviceSettings, Rule, ScoreSettings
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.testing.near_rig import DIM, HEADS, KV_HEADS, NOTHING, NearRig

CLOSE: dict[str, Any] = {
    "attention": {"rtol": 0.06, "atol": 1e-3},
    "products": {"rtol": 0, "atol": 0.8},
}
"""8 bits of the keys and of the query."""
TELLING = """
import sys
from penstock.kernels.native import compiled
from penstock.methods.hillinfer.near_storage import device_process

class Server(device_process.Server):
    def send(self, *arguments):
        with open(sys.argv[1], "w") as file:
            file.write(compiled.limited_to())
        super().send(*arguments)

sys.exit(device_process.main(sys.argv[2:], Server))
"""
"""A device that writes down what it may use before it says that it is ready."""


@pytest.mark.parametrize(("rule", "devices"), [("attention", 3), ("products", 1)])
def test_cold_tokens_are_scored_where_they_lie(rule: Rule, devices: int, tmp_path: Path) -> None:
    with NearRig(tmp_path, rule=rule, devices=devices) as rig:
        rig.fill()
        np.testing.assert_allclose(rig.score(140), rig.expected(140), **CLOSE[rule])
        hot = np.zeros((2, 150), dtype=np.bool_)
        hot[0, 3:60] = hot[1, 100] = True
        promoted = np.flatnonzero(hot)
        found = rig.score(150, Moved(promoted, NOTHING, reset=False))
        np.testing.assert_allclose(found, rig.expected(150, hot), **CLOSE[rule])
        back = Moved(NOTHING, promoted[:20], reset=False)
        hot.reshape(-1)[promoted[:20]] = False
        np.testing.assert_allclose(rig.score(150, back), rig.expected(150, hot), **CLOSE[rule])
        found = rig.score(150, Moved(promoted[:1], NOTHING, reset=True))
        hot[:] = False
        hot.reshape(-1)[promoted[0]] = True
        np.testing.assert_allclose(found, rig.expected(150, hot), **CLOSE[rule])


def test_a_device_and_this_process_score_alike(tmp_path: Path) -> None:
    with NearRig(tmp_path) as rig:
        rig.fill()
        local = LocalScorer(rig.store.scorer.settings, layers=1)
        local.put(0, rig.units.reshape(-1), rig.keys.reshape(rig.units.size, -1).view(np.uint8))
        local.map(0, 0, rig.units)
        scoring = local.begin(0, rig.query, 150, Moved(NOTHING, NOTHING, reset=False))
        out = np.full((2, 150), np.nan, dtype=np.float32)
        scoring.merge(scoring.log_sums(), out)
        np.testing.assert_array_equal(out, rig.score(150))


@pytest.mark.skipif(compiled.kernel("key_logits") is None, reason="kernels may not be used")
@pytest.mark.parametrize("level", ["off", "plain"])
def test_a_device_uses_the_kernels_that_this_process_may_use(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(NearDevice, "program", ("telling", str(tmp_path / "told")))
    former = compiled.limited_to()
    try:
        compiled.limit(level)
        with NearRig("memory"):
            assert (tmp_path / "told").read_text() == level
    finally:
        compiled.limit(former)


@pytest.mark.parametrize("devices", [2])
def test_units_come_back_byte_for_byte(devices: int, tmp_path: Path) -> None:
    with NearRig(tmp_path, devices=devices) as rig:
        rig.fill()
        order = np.random.default_rng(1).permutation(rig.units.size)
        found = rig.read(rig.units.reshape(-1)[order])
        both = np.stack([rig.keys, rig.values], axis=2).reshape(-1, 2, KV_HEADS, DIM)
        np.testing.assert_array_equal(found, both[order])


@pytest.mark.parametrize(("devices", "memory"), [(2, False), (1, True)])
def test_a_killed_device_starts_again_with_its_pool(
    devices: int, memory: bool, tmp_path: Path
) -> None:
    with NearRig("memory" if memory else tmp_path, devices=devices) as rig:
        rig.fill()
        before = rig.score(150)
        process = rig.store.devices[-1].process_id
        assert process is not None
        os.kill(process, signal.SIGKILL)
        with pytest.raises(ScorerError, match="started again"):
            rig.score_for(2.0)
        generation = rig.store.scorer.generation
        rig.store.scorer.ensure_alive()
        assert rig.store.scorer.generation > generation
        np.testing.assert_array_equal(rig.score(150), before)
        found = rig.read(rig.units[0])
        np.testing.assert_array_equal(found[:, 0], rig.keys[0])


def test_a_write_that_a_death_cut_short_is_sent_again(tmp_path: Path) -> None:
    with NearRig(tmp_path) as rig:
        process = rig.store.devices[0].process_id
        assert process is not None
        rig.store.region(0).reserve(rig.units.size)
        os.kill(process, signal.SIGKILL)
        rig.fill()
        np.testing.assert_allclose(rig.score(150), rig.expected(150), **CLOSE["attention"])


@pytest.mark.parametrize("devices", [2])
def test_what_was_written_before_a_death_and_mapped_after_it_has_codes(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NearRig(tmp_path, devices=devices) as rig:
        scorer = rig.store.scorer
        with monkeypatch.context() as patched:
            patched.setattr(scorer, "map", lambda *_: None)
            rig.fill()
        process = rig.store.devices[-1].process_id
        assert process is not None
        os.kill(process, signal.SIGKILL)
        rig.store.region(0).file.sync()  # as a later layer's write: the device starts again
        scorer.map(0, 0, rig.units[:, :100])
        scorer.map(0, 100, rig.units[:, 100:])
        np.testing.assert_allclose(rig.score(150), rig.expected(150), **CLOSE["attention"])


def test_another_batch_keeps_the_files(tmp_path: Path) -> None:
    with NearRig(tmp_path) as rig:
        rig.fill()
        before = rig.score(150)
        rig.store.serve(3)
        rig.store.scorer.map(0, 0, rig.units[[1, 0, 1]])
        rig.query = rig.query[[1, 0, 1]]
        rig.rows = 3
        np.testing.assert_array_equal(rig.score(150), before[[1, 0, 1]])


def test_a_simulated_device_is_called_simulated(tmp_path: Path) -> None:
    for place, devices in (("emmc", 1), (f"emmc:{tmp_path}", 2)):
        with NearRig(place, devices=devices) as rig:
            assert rig.store.simulated == "emmc"
            assert rig.store.describe().startswith("simulated eMMC (250 MB/s) over ")
    with NearRig(tmp_path) as rig:
        assert "eMMC" not in rig.store.describe()


def test_processes_end_with_their_store(tmp_path: Path) -> None:
    rig = NearRig(tmp_path, devices=2)
    processes = [device.process_id for device in rig.store.devices]
    rig.close()
    for process in processes:
        assert process is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), [("rows", "1"), ("dtype", "int8"), ("scaling", None)])
def test_settings_of_other_types_are_refused(name: str, value: object) -> None:
    common = {"rows": 1, "max_tokens": 4, "query_heads": 1, "kv_heads": 1, "head_dim": 2}
    settings = ScoreSettings(**common, dtype="float32", scaling=0.5)  # type: ignore[arg-type]
    whole = DeviceSettings.of(settings, layers=1, unit_bytes=16, stripes=Stripes())
    assert DeviceSettings.from_json(whole.as_json()) == whole
    with pytest.raises(ProtocolError, match=name):
        DeviceSettings.from_json({**whole.as_json(), name: value})


def test_a_device_that_is_dropped_ends_its_process(tmp_path: Path) -> None:
    with NearRig(tmp_path) as rig:
        device = NearDevice(rig.store.devices[0].settings, "memory", timeout_s=10.0)
    process = device.process_id
    assert process is not None
    os.kill(process, 0)
    del device
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_stripes_partition_the_units() -> None:
    stripes, units = Stripes(3, 4), np.arange(50)
    pairs = set(zip(stripes.owner(units).tolist(), stripes.local(units).tolist(), strict=True))
    assert len(pairs) == 50
    assert max(local for _, local in pairs) < stripes.num_local(50)
    for i in range(3):
        mine = stripes.local_units(units, i)
        assert ((mine >= 0) == (stripes.owner(units) == i)).all()
    assert HEADS % KV_HEADS == 0
