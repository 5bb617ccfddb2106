"""Near-storage devices on Ray, end to end: `make test-cluster` runs it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.cli.main import app as command
from penstock.cluster.ray_devices import states
from penstock.cluster.ray_session import connect
from penstock.evaluate.process_memory import command_line
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.storage.documents.key_sources import make_key_file

PROMPT = "The quick brown fox jumps over the lazy dog. " * 80


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One without hosts, which commands find."""
    made = Cluster()
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def host(cluster: Cluster, disks: int) -> Any:
    """Add a host; returns it."""
    resources = {"penstock_disk": disks}
    return cluster.add_node(num_cpus=1, resources=resources, include_dashboard=False)


def hillinfer(capsys: pytest.CaptureFixture[str], key: Path) -> str:
    """What the command answers over two devices of the cluster."""
    said = ("generate", "recall", "--raw", "--prompt", PROMPT, "--policy", "hillinfer")
    how = ("--memory", "1/2", "--dtype", "float32", "--max-new-tokens", 12)
    capsys.readouterr()
    assert run(*said, *how, "--devices", "ray:2", "--device-key-file", key) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def wanted() -> str:
    """What a local device answers."""
    llm = LLM("recall", policy="hillinfer", memory="1/2", dtype="float32", prefill_chunk_size=1024)
    [found] = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0))
    return found.outputs[0].text.strip()


def run(*words: Any) -> int:
    """A command's exit code."""
    code: int = command([str(each) for each in words], standalone_mode=False) or 0
    return code


def until_up(address: str) -> list[str]:
    """Addresses of both devices, when both are up."""
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        found = states(address=address)
        if [each.state for each in found] == ["up", "up"]:
            return [each.address for each in found]
        time.sleep(0.2)
    raise AssertionError(found)


def test_devices_stay_are_restarted_and_answer_as_a_local_one(
    cluster: Cluster, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host(cluster, 2)
    address = cluster.address
    monkeypatch.setenv("RAY_ADDRESS", address)
    key = tmp_path / "key"
    make_key_file(key)
    up = ("cluster", "up", "--devices", 2, "--key-file", key, "--port", 18471, "--disk")
    # Two disks are lent and one is named.
    assert run(*up, tmp_path) == 1
    assert "is free for a device" in capsys.readouterr().err
    for each in ("a", "b"):
        (tmp_path / each).mkdir()
    disks = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    assert run(*up, disks) == 0
    before = until_up(address)
    assert [each.rpartition(":")[2] for each in before] == ["18471", "18472"]
    assert run(*up, disks) == 0  # those that are there

    assert hillinfer(capsys, key) == wanted
    connect(address)
    for child in psutil.Process().children(recursive=True):
        if command_line(child).startswith("ray::DeviceActor"):
            os.kill(child.pid, signal.SIGKILL)
    assert until_up(address) == before
    assert run("cluster", "down") == 0
    assert states(address=address) == []
    assert hillinfer(capsys, key) == wanted  # none stays: the command has its own while it runs


def test_a_host_that_is_lost_gives_its_device_to_another_one(
    cluster: Cluster, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host(cluster, 1)
    lost = host(cluster, 1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    key = tmp_path / "key"
    make_key_file(key)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    disks = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    assert run("cluster", "up", "--devices", 2, "--key-file", key, "--disk", disks) == 0
    until_up(cluster.address)  # one has no room for both
    assert hillinfer(capsys, key) == wanted
    cluster.remove_node(lost, allow_graceful=False)
    end_s = time.monotonic() + 60
    while [each.state for each in states(address=cluster.address)].count("up") != 1:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    host(cluster, 1)
    until_up(cluster.address)
    assert hillinfer(capsys, key) == wanted
    assert run("cluster", "down") == 0
