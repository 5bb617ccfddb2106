"""Programs of research/ from the command line: bad input is one line, and foreign files stay."""

import runpy
import sys
from pathlib import Path

import pytest

EVIL = "\x1b]0;owned\x07\x9b31m\u202eskull"


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, *words: str
) -> str:
    """What `python -m MODULE` says on stderr when it ends with an error."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    told = capsys.readouterr()
    assert told.out == ""
    assert ended.value.code not in (0, None)
    return told.err + ("" if isinstance(ended.value.code, int) else str(ended.value.code))


@pytest.mark.parametrize("command", ["search", "settings", "tuning sweep", "clusters"])
def test_a_foreign_file_stays(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is refused before the work."""
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    package, *words = command.split()
    told = refused(monkeypatch, capsys, f"research.{package}", *words, "--out", str(file))
    assert "notes.txt is there already and " in told
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_that_is_no_result_is_one_printable_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("mine")
    for name in (str(tmp_path / "none"), str(tmp_path / "text"), EVIL):
        told = refused(monkeypatch, capsys, "research.figures", name)
        assert told.startswith("error: cannot read ")
        assert told.isprintable()
