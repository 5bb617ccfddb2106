"""The matrix of machines: what its lines cover, and what is read from their runs."""

import itertools
import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import (
    LINES,
    LONG_PATH,
    OWN_PYTHON,
    TITLES,
    Line,
    Outcome,
    environment,
    find_python,
    obstacle,
    read_log,
    table,
    without_compiler,
)

ALL_FLAGS = ("avx2", "avx512f", "avx512_vnni")
RUN = """
some of the suite ...
FAILED tests/a/test_b.py::test_c[1-x] - AssertionError: 3 passed in 1.0s
ERROR tests/a/test_d.py::test_e - OSError
1 failed, 10854 passed, 11 skipped, 1 error in 750.75s (0:12:30)
........
431 passed, 2 warnings in 9.10s
"""


def test_every_pair_of_instruction_sets_and_every_setting_has_a_line() -> None:
    pairs = set(itertools.product(("", "avx2", "avx512"), ("", "AVX2", "AVX512_CORE")))
    assert {(line.aten, line.onednn) for line in LINES} == pairs
    assert {line.threads for line in LINES} == {1, 2, 4}
    assert {line.columns for line in LINES} >= {60, 200}
    assert {line.kernels for line in LINES} == {"auto", "avx512", "plain", "none"}
    assert {line.python for line in LINES} >= {"3.11", "3.12", "3.13"}
    assert {line.transformers for line in LINES} >= {"", "5.2.0", "5.*"}
    for name in ("long_folder", "busy", "shuffle", "other_sums"):
        assert any(getattr(line, name) for line in LINES), name
    assert len({line.name for line in LINES}) == len(LINES) <= 12


@pytest.mark.parametrize(
    ("line", "flags", "why"),
    [
        (Line(name="a", aten="avx512"), ("avx2",), "the processor has no avx512f"),
        (Line(name="a", onednn="AVX2"), (), "the processor has no avx2"),
        (Line(name="a", kernels="avx512"), ("avx2",), "the processor has no avx512f"),
        (Line(name="a", python="3.999"), ALL_FLAGS, "there is no Python 3.999"),
        (Line(name="a", kernels="plain"), (), None),
        (
            Line(name="a", aten="avx2"),
            ("avx2", "amx_bf16"),
            "torch's attention in bfloat16 takes AMX and refuses ATEN_CPU_CAPABILITY=avx2",
        ),
        (Line(name="a", aten="avx2", onednn="AVX2"), ("avx2", "amx_bf16"), None),
        (Line(name="a", aten="avx512", onednn="AVX2"), ALL_FLAGS, None),
    ],
)
def test_what_a_machine_cannot_run_is_said(
    line: Line, flags: tuple[str, ...], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "find_python", {OWN_PYTHON: "some-python"}.get)
    assert obstacle(line, flags) == why


def script(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_is_one_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim is on the path for versions that are not chosen, too."""
    folder = tmp_path / "bin"
    script(folder / "python3.77", "echo 'command not found'; exit 127")
    plain = script(folder / "python3.78", "echo 3.78")
    monkeypatch.setenv("PATH", str(folder))
    assert find_python("3.77") is None
    assert find_python("3.78") == str(plain)
    assert find_python("3.79") is None
    root = tmp_path / "root"
    script(folder / "pyenv", f"echo {root}")
    installed = script(root / "versions" / "3.77.1" / "bin" / "python", "echo 3.77")
    script(root / "versions" / "3.7.9" / "bin" / "python", "echo 3.7")
    assert find_python("3.77") == str(installed)


def test_no_compiler_is_on_the_path_and_all_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    compilers = ("cc", "gcc", "gcc-12", "x86_64-linux-gnu-gcc", "clang", "clang-19", "c99", "g++")
    others = ("gccgo-tool", "sh", "python3", "ccache-stats", "git")
    for name in (*compilers, *others):
        (programs / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{tmp_path / 'none'}")
    left = without_compiler(tmp_path / "links")
    assert {name for name in compilers if shutil.which(name, path=left)} == set()
    assert {name for name in others if shutil.which(name, path=left)} == set(others)


def test_a_line_is_what_its_processes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("PENSTOCK_KERNELS", "plain")
    monkeypatch.setenv("MAKEFLAGS", "-j")
    line = Line(name="a", onednn="AVX2", kernels="plain", shuffle=3, other_sums=4,
                long_folder=True, columns=60)  # fmt: skip
    seen = environment(line, tmp_path)
    assert not {"ATEN_CPU_CAPABILITY", "PYTHONPATH", "MAKEFLAGS"} & set(seen)
    assert seen["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert seen["PENSTOCK_KERNELS"] == "plain"
    assert seen["COLUMNS"] == "60"
    assert seen["PYTEST_ADDOPTS"].split() == ["--shuffle=3", "--other-sums=4"]
    assert Path(seen["TMPDIR"]).is_dir()
    assert len(seen["TMPDIR"]) >= LONG_PATH
    (tmp_path / "b").mkdir()
    assert "PENSTOCK_KERNELS" not in environment(Line(name="b"), tmp_path / "b")


def test_counts_are_those_of_all_runs() -> None:
    assert read_log(RUN) == {
        "passed": 10854 + 431, "failed": 2, "skipped": 11,
        "failures": ["tests/a/test_b.py::test_c[1-x]", "tests/a/test_d.py::test_e"],
    }  # fmt: skip
    assert read_log("make: *** [install] Error 1")["passed"] == 0


def test_the_table_has_a_row_for_each_line() -> None:
    machines = [{"cpu": f"cpu {cores}", "cores": cores, "flags": ["avx2"]} for cores in (3, 16)]
    outcomes = [
        Outcome(line=asdict(line), machine=machines[line.threads == 1], commit="0123456789abcdef",
                outcome="passed", passed=7, workers=line.threads)
        for line in LINES
    ]  # fmt: skip
    outcomes[0].failures = ["tests/test_x.py::test_y"]
    text = table(outcomes)
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert len(rows) == 2 + len(LINES)
    assert len({row.count("|") for row in rows}) == 1
    assert "Machine A: cpu 16, 16 cores (avx2)" in text
    assert "Machine B: cpu 3, 3 cores (avx2)" in text
    for row, line in zip(rows[2:], LINES, strict=True):
        cells = dict(zip(TITLES, row.strip("| ").split(" | "), strict=True))
        assert cells["machine"] == ("A" if line.threads == 1 else "B")
        assert (cells["workers"], cells["passed"]) == (str(line.threads), "7")
    assert "`tests/test_x.py::test_y`" in text
    assert all(line.name in text and line.said() in text for line in LINES)


MAKEFILE = """
.venv/interpreter.stamp:
\t@echo installed >> {calls}; mkdir -p .venv; touch $@
demo:
\t@echo demo $(PYTHON) >> {calls}
test-all:
\t@echo test $(THREADS) $(WORKERS) $$ONEDNN_MAX_CPU_ISA $$PYTEST_ADDOPTS >> {calls}
\t@{first}
\t@echo '5 passed in 0.10s'
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a Makefile like the project's, and nothing that takes time."""
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    monkeypatch.setattr(matrix, "ROOT", root)
    monkeypatch.setattr(matrix, "TABLE", root / "docs" / "test-matrix.md")
    monkeypatch.setattr(matrix, "RESULT", root / "docs" / "test-matrix.json")
    lines = (
        Line(name="one", onednn="AVX2", threads=4), Line(name="two", shuffle=2, busy=True),
        Line(name="none", python="3.999"),
    )  # fmt: skip
    monkeypatch.setattr(matrix, "LINES", lines)
    monkeypatch.setattr(matrix, "processor", lambda: {"cpu": "x", "cores": 1, "flags": ["avx2"]})
    monkeypatch.setattr(matrix, "find_python", {OWN_PYTHON: "some-python"}.get)
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def commit(root: Path, first: str) -> Path:
    calls = root.parent / "calls"
    (root / "Makefile").write_text(MAKEFILE.format(calls=calls, first=first))
    git(root, "add", "Makefile")
    git(root, "commit", "-qm", first)
    return calls


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", root, *who, *words], check=True)


@pytest.mark.skipif(not (shutil.which("git") and shutil.which("make")), reason="no git or make")
def test_lines_are_run_once_for_the_same_code(checkout: Path, tmp_path: Path) -> None:
    calls = commit(checkout, "echo '7 passed in 0.10s'")
    assert matrix.main(["--only=two"]) == 0
    assert matrix.main([]) == 0
    text = calls.read_text()
    assert "test 4 2 AVX2\n" in text
    assert text.count("test 1 2 --shuffle=2") == 1, "not again at the same commit"
    assert text.count("demo some-python") == 2
    one, two, none = json.loads(matrix.RESULT.read_text())["lines"]
    assert [each["outcome"] for each in (one, two)] == ["passed", "passed"]
    assert (one["passed"], one["demo"]) == (12, "right")
    assert none["outcome"] == "not run: there is no Python 3.999"
    assert "there is no Python 3.999" in matrix.TABLE.read_text()
    git(checkout, "add", "docs")
    git(checkout, "commit", "-qm", "the table alone")
    assert matrix.main([]) == 0
    assert calls.read_text() == text, "nor where the table alone has changed"

    commit(checkout, "echo FAILED tests/a.py::b; echo '1 failed, 7 passed in 0.10s'; false")
    assert matrix.main(["--only=one"]) == 1
    again, stays = json.loads(matrix.RESULT.read_text())["lines"]
    assert (again["outcome"], again["failed"], again["passed"]) == ("failed", 1, 12)
    assert again["failures"] == ["tests/a.py::b"]
    assert stays == two, "until it is run with this code"
    assert matrix.main(["--only=two"]) == 1
    assert calls.read_text().count("test 1 2 --shuffle=2") == 2

    commit(checkout, "sleep 600")
    assert matrix.main(["--only=one", "--limit=0.01", f"--work={tmp_path / 'work'}"]) == 1
    assert "stopped after 1 s" in (tmp_path / "work" / "one.log").read_text()

    (checkout / "Makefile").write_text("changed")
    with pytest.raises(SystemExit):
        matrix.main([])


@pytest.mark.skipif(not (shutil.which("git") and shutil.which("make")), reason="no git or make")
def test_lines_of_two_machines_stand_in_one_table(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> dict[str, dict[str, object]]:
        document = json.loads(matrix.RESULT.read_text())
        return {each["line"]["name"]: each for each in document["lines"]}

    calls = commit(checkout, "echo '7 passed in 0.10s'")
    assert matrix.main(["--workers=3"]) == 0
    assert "test 4 3 AVX2\n" in calls.read_text()
    here = lines()
    assert (here["one"]["machine"], here["one"]["workers"]) == (matrix.processor(), 3)
    other = {"cpu": "y", "cores": 16, "flags": []}
    monkeypatch.setattr(matrix, "processor", lambda: other)
    assert matrix.main([]) == 0
    there = lines()
    assert there["one"] == here["one"], "another machine's, where this one lacks AVX2"
    assert there["two"]["machine"] == other, "this machine's own, where it can run it"
    assert calls.read_text().count("test 1") == 2

    taken = tmp_path / "other.json"
    matrix.RESULT.rename(taken)
    matrix.TABLE.unlink()
    assert matrix.main([f"--add={taken}"]) == 0
    assert lines() == {n: each for n, each in there.items() if each["outcome"] == "passed"}
    text = matrix.TABLE.read_text()
    assert "Machine A: x, 1 cores (avx2)" in text
    assert "Machine B: y, 16 cores (none of the sets that matter)" in text

    document = json.loads(taken.read_text())
    for each in document["lines"]:
        del each["machine"], each["workers"]
    older = {"machine": {"cpu": "z", "cores": 2, "flags": []}, "lines": document["lines"]}
    taken.write_text(json.dumps(older))
    assert matrix.main([f"--add={taken}"]) == 0
    assert "Machine A: z, 2 cores" in matrix.TABLE.read_text()

    before = lines()
    commit(checkout, "echo other code")
    assert matrix.main(["--add", str(taken)]) == 0
    assert lines() == before
    assert matrix.main(["--only=two"]) == 0
    newer = lines()["two"]
    assert newer["commit"] != before["two"]["commit"]
    assert matrix.main(["--add", str(taken)]) == 0
    assert lines()["two"] == newer, "newer code before older"
