"""`penstock devices`: the table, the JSON, and bad input."""

import json
from pathlib import Path

import pytest

from penstock.cli import devices
from penstock.core.errors import ConfigError
from penstock.devices.measure import Cell, measure_reads
from penstock.storage import measured_directory
from penstock.storage.measured_directory import DirectoryMeasurement


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure four cells for a moment each instead of twenty for long."""
    cells = [(4096, 1), (4096, 32), (65536, 1), (65536, 32)]
    monkeypatch.setattr(measured_directory, "cells_of", lambda: cells)
    monkeypatch.setattr(
        measured_directory,
        "measure_reads",
        lambda read, size, wanted, seconds_per_cell: measure_reads(
            read, size, wanted, seconds_per_cell=0
        ),
    )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_table(
    columns: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    devices.devices_command(disk=str(tmp_path), size="64MiB")
    text = capsys.readouterr().out
    assert "MB/s" in text
    assert text.count("(simulated)") == 3
    assert "4 KiB" in text
    assert f"Measured: {tmp_path}" in text, "in one piece"


@pytest.mark.usefixtures("quick")
def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices.devices_command(disk=str(tmp_path), size="64MiB", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    reads = answer["measured"]["reads"]
    assert [(r["request_bytes"], r["depth"]) for r in reads] == [
        (4096, 1), (4096, 32), (65536, 1), (65536, 32),
    ]  # fmt: skip
    assert all(r["bytes_per_s"] > 0 for r in reads)
    assert {entry["name"] for entry in answer["simulated"]} == {"nvme", "ufs", "emmc"}
    assert all(entry["simulated"] and entry["source"] for entry in answer["simulated"])


def test_figures_that_are_not_of_a_disk_are_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Cell(4096, 1, 1e9, 4e-6, 5), Cell(65536, 32, 5e9, 4e-4, 5)]
    measured = DirectoryMeasurement("/somewhere (tmpfs)", False, 512, 1e9, cells)
    monkeypatch.setattr(measured_directory, "measure_directory", lambda path, **settings: measured)
    devices.devices_command()
    assert "not of a disk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "size"), [("nvme", "64MiB"), ("memory", "64MiB"), ("auto", "lots"), ("auto", "1KiB")]
)
def test_bad_input(path: str, size: str) -> None:
    with pytest.raises(ConfigError):
        devices.devices_command(disk=path, size=size)
