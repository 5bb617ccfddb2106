"""What the throughput program has measured is saved before it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate import throughput

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_what_was_measured_is_kept_when_prefill_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept.json"
    result = throughput.run([
        "--config=tiny", "--context=1024", "--batch=1", "--memory=1/400", "--steps=2",
        "--rounds=1", "--devices=real", "--rows=floor, StaticCache;flexgen;kvswap",
        "--prefill-tokens=256", "--prefill-chunks=64", "--prefill-rounds=2",
        "--disk-file-mib=64", f"--store={tmp_path}", f"--out={out}",
    ])  # fmt: skip
    rows = {row["label"]: row for row in result.figures["prefill"]}
    assert "too little" in rows["kvswap, chunks of 64"]["skipped"]
    assert rows["kvswap, chunks of 64"]["ttft_s"] is None
    assert len(rows["DynamicCache, chunks of 64"]["seconds"]) == 2
    assert json.loads(out.read_text())["figures"]["rows"] == result.figures["rows"]
    assert rows["kvswap, chunks of 64"]["skipped"] in capsys.readouterr().out


def test_every_batch_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "first.json"
    real = vars(throughput)["run_session"]

    def once(session: Any, number: int, *args: Any) -> Any:
        if number > 1:
            raise KeyboardInterrupt
        return real(session, number, *args)

    monkeypatch.setattr(throughput, "run_session", once)
    with pytest.raises(KeyboardInterrupt):
        throughput.run([
            "--config=tiny", "--context=1024", "--batch=1,2", "--memory=1/2",
            "--steps=2", "--rounds=1", "--devices=real", "--rows=floor, StaticCache",
            "--prefill-tokens=0", "--disk-file-mib=64", f"--store={tmp_path}", f"--out={out}",
        ])  # fmt: skip
    assert {row["batch"] for row in json.loads(out.read_text())["figures"]["rows"]} == {1}


@pytest.mark.parametrize(
    "wrong", ["--batch=1,x", "--batch=0", "--prefill-chunks=big", "--prefill-chunks="]
)
def test_lists_of_numbers_are_checked_first(wrong: str) -> None:
    with pytest.raises(ConfigError, match="takes numbers"):
        throughput.run([wrong])
