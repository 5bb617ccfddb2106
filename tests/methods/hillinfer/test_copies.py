"""With two copies a device that fails costs a deadline, not the answer."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.engine.attention_call import AttentionCall
from penstock.methods.hillinfer.near_storage import refill
from penstock.methods.hillinfer.near_storage.channel import LateError, ScorerError
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_storage.scorer import _RemoteScoring
from penstock.methods.hillinfer.near_storage.striped_file import StripedFile
from penstock.methods.hillinfer.near_storage.stripes import Stripes
from penstock.methods.hillinfer.near_storage.written_units import WrittenUnits
from penstock.methods.hillinfer.policy import HillInfer
from tests.methods.hillinfer.test_near_layer import SCALING, Draw, runtime_of
from tests.methods.hillinfer.test_tcp_devices import KEY

PROMPT, STEPS = 300, 6


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def answers(
    fail: Callable[[NearStore], object] | None = None,
    later: Callable[[NearStore], object] | None = None, **options: Any,
) -> list[np.ndarray]:  # fmt: skip
    """What some decode steps of one layer give; `fail` is called in the middle, `later` before the
    last two."""
    draw, out = Draw(), []
    keys, values = draw(2, 2, PROMPT), draw(2, 2, PROMPT)
    with runtime_of(2, 400, "memory", hot_tokens=60, **options) as runtime:
        call = AttentionCall(draw(2, 4, PROMPT), keys, values, SCALING)
        runtime.attend(0, call)
        for step in range(STEPS):
            call = AttentionCall(draw(2, 4, 1), draw(2, 2, 1), draw(2, 2, 1), SCALING)
            if fail is not None and step == STEPS // 2:
                assert isinstance(runtime._store, NearStore)
                fail(runtime._store)
            if later is not None and step == STEPS - 2:
                assert isinstance(runtime._store, NearStore)
                later(runtime._store)
            out.append(runtime.attend(0, call).numpy().copy())
        if fail is not None:
            assert isinstance(runtime._store, NearStore)
            assert "lost" in runtime._store.describe()  # and perhaps brought back by now
    return out


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    return answers()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_answer_goes_on_without_a_device(
    kind: str, key: Path, expected: list[np.ndarray]
) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(DeviceHost(KEY, disk=str(key.parent)))
            for _ in range(2 if kind == "tcp" else 0)
        ]

        def fail(store: NearStore) -> None:
            if hosts:
                hosts[0].close()
            else:  # a killed one is started again
                process, store.devices[0].timeout_s = store.devices[0].process_id, 0.5
                assert process is not None
                os.kill(process, signal.SIGSTOP)

        found = answers(
            fail, copies=2, device_key=f"file:{key}",
            devices=",".join(f"tcp://{host.address}" for host in hosts) or 2,
        )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["killed", "empty", "frozen"])
def test_a_host_that_comes_back_is_filled_from_the_other(
    kind: str, key: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the other one may fail: what it held, and what was written since, is there."""
    monkeypatch.setattr(refill, "FIRST_S", 0.05)
    disk = str(key.parent)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(DeviceHost(KEY, disk=disk, listen="127.0.0.1:0")) for _ in range(2)
        )

        def fail(store: NearStore) -> None:
            first.close()
            if kind != "killed":
                stack.enter_context(DeviceHost(KEY, disk=disk, listen=first.address))
            if kind == "frozen":
                store.devices[0].give_up(LateError("it is late"))

        def later(store: NearStore) -> None:
            if kind == "killed":
                stack.enter_context(DeviceHost(KEY, disk=disk, listen=first.address))
            assert store.refiller is not None
            end = time.monotonic() + 120
            while store.holders.away:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert store.refiller.refilled
            assert "lost, and filled again" in store.describe()
            second.close()

        found = answers(
            fail, later, copies=2, device_key=f"file:{key}",
            devices=f"tcp://{first.address},tcp://{second.address}",
        )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_written_while_a_copy_is_made_is_copied_again() -> None:
    stripes = Stripes(3, 4, copies=2)
    written = WrittenUnits(1, 40, stripes)
    for first in range(0, 48, 4):
        written.note(0, first, 4, [])
    assert [written.num_missed(i) for i in range(3)] == [0, 0, 0]
    written.miss_all(1)
    assert [written.num_missed(i) for i in range(3)] == [0, 32, 0]
    [(copy, units)] = written.missed(0, 1, 6)
    assert (copy, units.tolist()) == (0, [4, 5, 6, 7, 16, 17])
    written.note(0, 16, 4, [0])  # device 1 is away: it misses the new bytes, too
    written.note(0, 0, 4, [])  # this one it got by itself
    left = [written.missed(0, 1, 100), written.missed(0, 1, 100)]
    assert [copy for copy, _ in left[0]] == [0, 1]
    assert left[0][0][1].tolist() == [16, 17, 18, 19, 28, 29, 30, 31, 40, 41, 42, 43]
    assert left[0][1][1].tolist() == [*range(12, 16), *range(24, 28), *range(36, 40)]
    assert left[1] == []
    written.miss(0, *left[0][1])
    assert written.num_missed(1) == 12


@pytest.mark.parametrize("moment", ["between steps", "begin", "merge", "submit_reads", "write_at"])
def test_both_holders_lost_is_an_error(
    moment: str, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        DeviceHost(KEY, disk=str(key.parent)) as host,
        DeviceHost(KEY, disk=str(key.parent)) as other,
    ):

        def close(*_: object) -> None:
            host.close()
            other.close()

        def fail(store: NearStore) -> None:
            if moment == "between steps":
                close()
                return
            owner: Any = {"begin": type(store.scorer), "merge": _RemoteScoring}.get(
                moment, StripedFile
            )
            inner = getattr(owner, moment)

            def act(*args: Any) -> Any:
                close()
                return inner(*args)

            monkeypatch.setattr(owner, moment, act)

        with pytest.raises(ScorerError, match="copies are lost"):
            answers(
                fail, copies=2, device_key=f"file:{key}",
                devices=f"tcp://{host.address},tcp://{other.address}",
            )  # fmt: skip


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_copy_is_on_another_device_and_nothing_shares_a_place(devices: int) -> None:
    stripes, units = Stripes(devices, 4, copies=2), np.arange(50)
    places = []
    for copy in (0, 1):
        on = (stripes.owner(units) + copy) % devices
        places += list(zip(on.tolist(), stripes.local(units, copy).tolist(), strict=True))
    assert len(set(places)) == len(places)
    assert max(local for _, local in places) < stripes.num_local(len(units))
    for lost in range(devices):
        answering = [stripes.holders(i)[int(i == lost)] for i in range(devices)]
        seen = [stripes.local_units(units, i, answering) for i in range(devices)]
        assert (seen[lost] == -1).all()
        assert ((np.stack(seen) >= 0).sum(axis=0) == 1).all()


def test_copies_want_devices() -> None:
    with pytest.raises(ConfigError, match="copies=2"):
        HillInfer(copies=2)
    assert HillInfer(copies=2, devices=2).num_devices == 2
