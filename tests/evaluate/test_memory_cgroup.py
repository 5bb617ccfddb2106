"""A memory limit of the kernel, against a folder that looks like one."""

import argparse
import json
import os
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.limited_decode import limited_decode, run_limited
from penstock.evaluate.memory_cgroup import MemoryCgroup
from tests.ready_process import run_ready


def test_version_1(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/jobs/one\n0::/\n")
    parent = tmp_path / "root" / "memory" / "jobs" / "one"
    parent.mkdir(parents=True)
    (parent / "memory.limit_in_bytes").write_text("9")
    group = MemoryCgroup.below_own(tmp_path / "root", own)
    assert group.path.parent == parent
    group.join()
    group.limit(12345)
    assert (group.path / "cgroup.procs").read_text() == str(os.getpid())
    assert (group.path / "memory.limit_in_bytes").read_text() == "12345"
    (group.path / "memory.usage_in_bytes").write_text("77\n")
    (group.path / "memory.stat").write_text("cache 5\nrss 6\n")
    assert (group.usage_bytes, group.page_cache_bytes()) == (77, 5)
    assert group.peak_bytes == 0
    group.close()
    assert (parent / "cgroup.procs").read_text() == str(os.getpid())


def test_version_2_without_delegation_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text("anon 1\n")
    with pytest.raises(ConfigError, match="not passed on"):
        MemoryCgroup(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_no_controller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no memory controller"):
        MemoryCgroup(tmp_path)
    with pytest.raises(ConfigError, match="no control groups"):
        MemoryCgroup.below_own(tmp_path, tmp_path / "missing")


def test_decoding_is_measured_without_a_limit_too(tmp_path: Path) -> None:
    args = argparse.Namespace(
        config="tiny", context=1500, memory="1/2", steps=3, group="none", store=str(tmp_path),
        batch=1, seed=0,
    )  # fmt: skip
    found = limited_decode(args)
    assert json.dumps(found)
    assert found["enforced"] is False
    assert found["tokens"] == 3
    assert found["ledger_bytes"] > 0
    assert found["own_files_cached_bytes"] == 0 or found["own_files_cached_bytes"] is None


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.evaluate.limited_decode.subprocess.run", run_ready)
    found = run_limited(["--config=tiny", "--context=1500", "--memory=1/999", "--group=none"])
    assert found["survived"] is False
    assert "too little" in found["reason"]
