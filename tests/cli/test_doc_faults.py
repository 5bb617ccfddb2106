"""Whatever happens to a stored document's files: `doc ask` answers the same, or says one line."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.models import loader
from penstock.testing.tiny_chat import tiny_chat_model

SENTENCES = "The grass is green . The sky is blue . The sun is yellow . Here we go . "
TEXT = f"{SENTENCES}There and back again . " * 5
EACH_SEEDS = 4


def flip(folder: Path, chance: random.Random) -> str:
    path = _file_of(folder, chance)
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path.name


def truncate(folder: Path, chance: random.Random) -> str:
    path = _file_of(folder, chance)
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])
    return path.name


def delete(folder: Path, chance: random.Random) -> str:
    path = _file_of(folder, chance)
    path.unlink()
    return path.name


def swap(folder: Path, chance: random.Random) -> str:
    one, two = chance.sample(sorted(folder.glob("kv-*.units")), 2)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    return f"{one.name} and {two.name}"


def intrude(folder: Path, chance: random.Random) -> str:
    """A file of somebody else, beside the document's or in place of one."""
    path = folder / "notes.txt" if chance.random() < 0.3 else _file_of(folder, chance)
    path.unlink(missing_ok=True)
    if chance.random() < 0.3:
        path.mkdir()
    elif chance.random() < 0.5:
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(chance.randbytes(chance.randrange(10_000)))
    return path.name


def _file_of(folder: Path, chance: random.Random) -> Path:
    """Any kind of file as likely as any other, though there are many of units."""
    paths = sorted(folder.iterdir())
    kind = chance.choice(sorted({path.name.partition("-")[0] for path in paths}))
    return chance.choice([path for path in paths if path.name.partition("-")[0] == kind])


FAULTS: list[Callable[[Path, random.Random], str]] = [flip, truncate, delete, swap, intrude]


def ask(library: Path) -> Any:
    return CliRunner().invoke(
        app, ["doc", "ask", "green", "The grass is", "--max-new-tokens", "4", "--disk", "memory",
              "--library", str(library)],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_chat_model()
    monkeypatch.setattr(loader, "load", lambda *_, **options: loaded)


def test_the_same_answer_or_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    sound = tmp_path / "sound"
    added = CliRunner().invoke(
        app, ["doc", "add", "recall", str(tmp_path / "text.txt"), "--name", "green", "--disk",
              "memory", "--library", str(sound)],
    )  # fmt: skip
    assert added.exit_code == 0, added.stderr
    expected = ask(sound).stdout
    assert expected.strip()
    outcomes = Counter[str]()
    for seed in range(EACH_SEEDS * len(FAULTS)):
        chance, fault = random.Random(seed), FAULTS[seed % len(FAULTS)]
        library = tmp_path / f"lib-{seed}"
        shutil.copytree(sound, library)
        what = f"seed {seed}: {fault.__name__} {fault(library / 'green', chance)}"
        done = ask(library)
        assert done.exception is None or isinstance(done.exception, SystemExit), what
        if done.exit_code == 0:
            assert done.stdout == expected, what
            outcomes["mended" if "damage was found" in done.stderr else "answered"] += 1
        else:
            assert done.exit_code in (1, 2), what
            progress = ("damage was found", "prefill again")
            said = [line for line in done.stderr.splitlines() if not line.startswith(progress)]
            assert len(said) == 1, f"{what}: {done.stderr}"
            assert said[0].startswith("error: "), f"{what}: {done.stderr}"
            assert "unexpected" not in said[0], f"{what}: {done.stderr}"
            assert done.stdout in ("", "\n"), what
            outcomes["refused"] += 1
        shutil.rmtree(library)
    assert outcomes.total() == EACH_SEEDS * len(FAULTS)
    assert min(outcomes[each] for each in ("mended", "answered", "refused")) >= 2, outcomes
