"""Which version a measurement was made with: the commit, and whether anything differed from it."""

import shutil
import subprocess
from pathlib import Path

import pytest

import penstock
from penstock.evaluate import machine
from penstock.evaluate.machine import current_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def git(folder: Path, *args: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", *who, *args], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a folder in it and a page beside it, committed."""
    folder = tmp_path / "src" / "package"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "research").mkdir()
    program = tmp_path / "research" / "program.py"
    for path in (folder / "code.py", folder / "inner" / "code.py", program, tmp_path / "page.md"):
        path.write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_alone_where_nothing_differs(package: Path) -> None:
    assert current_commit(package) == git(package, "rev-parse", "--short=12", "HEAD")
    (package.parents[1] / "page.md").write_text("two\n")
    assert "+changes" not in current_commit(package), "a page is no code"


@pytest.mark.parametrize(
    "place", ["code.py", "inner/code.py", "new.py", "../../research/program.py"]
)
def test_any_file_of_the_package_or_of_research_that_differs_is_said(
    package: Path, place: str
) -> None:
    (package / place).write_text("two\n")
    assert current_commit(package).endswith("+changes")


def test_without_a_repository_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert current_commit(tmp_path) == "unknown"


def test_the_whole_package_is_looked_at() -> None:
    assert Path(penstock.__file__).parent == machine._PACKAGE
