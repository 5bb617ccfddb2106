"""Devices on Ray, as far as they go without it: each takes a disk, and the extra is named."""

from pathlib import Path

import pytest

from penstock.cli.main import app as command
from penstock.cluster import ray_session
from penstock.cluster.ray_devices import DeviceActor, DeviceSetup
from penstock.core.errors import StorageError
from penstock.storage.documents.key_sources import make_key_file


def test_each_device_takes_a_disk_of_its_host_and_lets_it_go(tmp_path: Path) -> None:
    key, disks = tmp_path / "key", [tmp_path / "a", tmp_path / "b"]
    make_key_file(key)
    for each in disks:
        each.mkdir()
    places = (str(tmp_path / "another host's"), *map(str, disks))
    setup = DeviceSetup(key_file=str(key), disks=places, memory_bytes=1 << 20)
    actors = [DeviceActor(setup, number, "127.0.0.1") for number in range(2)]
    said = [each.said() for each in actors]
    assert [disk for _, disk, _ in said] == [f"127.0.0.1:{each}" for each in disks]
    assert len({address for address, _, _ in said}) == 2
    with pytest.raises(StorageError, match="penstock_disk"):
        DeviceActor(setup, 2, "127.0.0.1")
    actors[0].close()
    again = DeviceActor(setup, 0, "127.0.0.1")
    assert again.said()[1] == said[0][1]
    for actor in (*actors, again):
        actor.close()


@pytest.mark.parametrize(
    "words",
    [
        "serve recall --replicas 2",
        "cluster up --devices 2 --key-file key",
        "cluster status",
        "cluster down",
        "generate recall --prompt Hi --policy hillinfer --devices ray:2 --device-key-file key",
    ],
)
def test_without_ray_the_extra_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_session, "find_spec", lambda name: None)
    assert command(words.split(), standalone_mode=False) == 2
    said = capsys.readouterr().err
    assert "penstock[cluster]" in said
    assert said.count("\n") == 1
