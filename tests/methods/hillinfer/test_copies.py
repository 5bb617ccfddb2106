"""With two copies a device that fails costs a deadline, not the answer."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.engine.attention_call import AttentionCall
from penstock.methods.hillinfer.near_storage.channel import ScorerError
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_storage.scorer import _RemoteScoring
from penstock.methods.hillinfer.near_storage.striped_file import StripedFile
from penstock.methods.hillinfer.near_storage.stripes import Stripes
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


def answers(fail: Callable[[NearStore], object] | None = None, **options: Any) -> list[np.ndarray]:
    """What some decode steps of one layer give; `fail` is called in the middle."""
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
            out.append(runtime.attend(0, call).numpy().copy())
        if fail is not None:
            assert isinstance(runtime._store, NearStore)
            assert runtime._store.holders.away
            assert "lost, its copies answer" in runtime._store.describe()
    return out


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_answer_goes_on_without_a_device(kind: str, key: Path) -> None:
    expected = answers()
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(DeviceHost(KEY, disk=str(key.parent)))
            for _ in range(2 if kind == "tcp" else 0)
        ]

        def fail(store: NearStore) -> None:
            if hosts:
                hosts[0].close()
            else:  # a killed one is started again
                process = store.devices[0].process_id
                assert process is not None
                os.kill(process, signal.SIGSTOP)

        found = answers(
            fail, copies=2, timeout_s=3.0, device_key=f"file:{key}",
            devices=",".join(f"tcp://{host.address}" for host in hosts) or 2,
        )  # fmt: skip
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


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
