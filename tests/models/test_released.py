"""Released models: packed alike each time, fetched whole or not at all, known by their names."""

import hashlib
import io
import lzma
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli.main import EXIT_BAD_INPUT, app
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.models import released as table
from penstock.models.bundled_adapter import find_adapter
from penstock.models.calibrate import calibrate
from penstock.models.fetch import fetch
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import load
from penstock.models.released import Released
from training import release
from training.model import build
from training.settings import Architecture

ROOT = Path(release.__file__).parents[1]
RECALL = ROOT / "src" / "penstock" / "models" / "recall"
TINY = Architecture(
    layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, feed_forward=32, positions=512,
    rope_theta=1e4, init_std=0.5,
)  # fmt: skip
TRAIN = "python -m training.train x.toml"


class Site(ThreadingHTTPServer):
    """One file, whole or in part, cut off where a test wants it."""

    content = b""
    status = 200
    cut_at: int | None = None
    ranges = True
    asked: list[str]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        site: Any = self.server
        wanted = self.headers.get("Range", "")
        site.asked.append(wanted)
        if site.status != 200:
            self.send_error(site.status)
            return
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        first = first if site.ranges else 0
        body = site.content[first:]
        self.send_response(206 if first else 200)
        if first:
            last = len(site.content) - 1
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(site.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if site.cut_at is None else body[: site.cut_at - first])

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site(("127.0.0.1", 0), Answer)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, with an adapter."""
    folder = tmp_path_factory.mktemp("original")
    model = build(TINY, 1472, 0)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECALL / name, folder)
    calibrate(model.eval(), [torch.arange(4, 200)], rank=4, path=folder / "adapter.safetensors")
    return folder


@pytest.fixture(scope="module")
def archive(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "prose-9.tar.xz"
    release.pack(original, path, "prose-9")
    return path


@pytest.fixture
def model(archive: Path, original: Path, site: Site) -> Released:
    """Released at the site."""
    site.content = archive.read_bytes()
    sizes = [path.stat().st_size for path in original.iterdir()]
    return Released(
        name="prose-9", file=archive.name, bytes=len(site.content),
        sha256=hashlib.sha256(site.content).hexdigest(),
        files=len(sizes), unpacked_bytes=sum(sizes),
        url=f"http://127.0.0.1:{site.server_port}/{archive.name}", train=TRAIN,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, model: Released, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, and a table that has the model."""
    path = tmp_path / "released.toml"
    path.write_text(release.entry(model))
    monkeypatch.setattr(table, "_TABLE", path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def is_whole(folder: Path, original: Path) -> bool:
    names = sorted(path.name for path in original.iterdir())
    return names == sorted(path.name for path in folder.iterdir()) and all(
        (folder / name).read_bytes() == (original / name).read_bytes() for name in names
    )


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_package_s_own_table_is_sound() -> None:
    for name, one in table.released_models().items():
        assert one.name == name
        assert one.file == f"{name}.tar.xz"
        assert len(bytes.fromhex(one.sha256)) == 32
        assert one.unpacked_bytes > one.bytes > 1_000_000
        assert one.files > 3
        starts = ("train training/configs/", "retrain training/recipes/")
        assert one.train.startswith(tuple(f"python -m training.{start}" for start in starts))


def test_packing_is_reproducible(original: Path, tmp_path: Path, archive: Path) -> None:
    other = Path(shutil.copytree(original, tmp_path / "other", copy_function=shutil.copyfile))
    for path in other.iterdir():
        path.chmod(0o600)
    release.pack(other, tmp_path / "again.tar.xz", "prose-9")
    assert (tmp_path / "again.tar.xz").read_bytes() == archive.read_bytes()
    with tarfile.open(archive) as members:
        names = [member.name for member in members]
        assert names == sorted(names)
        assert {member.mtime for member in members} == {0}


def test_release_prints_its_entry(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "prose-9" / "model"))
    assert release.main([str(folder), "--url", "https://x/y"]) == 0
    path = tmp_path / "prose-9" / "prose-9.tar.xz"
    out = capsys.readouterr().out
    assert hashlib.sha256(path.read_bytes()).hexdigest() in out
    assert f"bytes = {path.stat().st_size}\n" in out
    assert '["prose-9"]' in out
    (folder / "more").mkdir()
    assert release.main([str(folder)]) == 2
    assert "no plain file" in capsys.readouterr().err


def test_fetch_by_name_and_use(original: Path, home: Path, model: Released) -> None:
    line = run("generate", "prose-9", "--prompt", "The sky is").stderr
    assert "penstock fetch prose-9" in line
    assert TRAIN in line
    done = run("fetch", "prose-9")
    assert done.exit_code == 0, done.output
    assert is_whole(model.folder, original)
    assert model.folder.is_relative_to(home)
    assert [path.name for path in model.folder.parent.iterdir()] == ["prose-9"]
    assert "there already" in run("fetch", "prose-9").output
    loaded = load("prose-9")
    assert loaded.name == "prose-9"
    answered = run("generate", "prose-9", "--prompt", "The sky is", "--max-new-tokens", "2")
    assert answered.exit_code == 0, answered.output


@pytest.mark.usefixtures("home")
def test_a_fetched_model_brings_its_adapter(
    model: Released, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = fingerprint(load(original).model)
    monkeypatch.setattr("penstock.models.bundled_adapter._BUNDLED", tmp_path / "none")
    assert find_adapter(mark) is None
    fetch(model, model.folder)
    assert find_adapter(mark) is not None


@pytest.mark.usefixtures("home")
def test_a_folder_brings_its_adapter(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.models.bundled_adapter._BUNDLED", tmp_path / "none")
    model = load(original).model
    mark = fingerprint(model)
    assert find_adapter(mark, model.name_or_path) is not None
    assert find_adapter("another model", model.name_or_path) is None
    (tmp_path / "adapter.safetensors").write_bytes(b"of somebody else")
    assert find_adapter(mark, tmp_path) is None


def test_a_folder_that_may_not_be_looked_at_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses names of such length as it refuses folders of other users."""
    refused = Path("/", "n" * 300)
    with pytest.raises(OSError, match="too long"):
        refused.stat()
    monkeypatch.setattr(table, "models_folder", lambda: refused)
    released = Released(
        name="r", file="r", bytes=1, sha256="", files=1, unpacked_bytes=1, url="", train=TRAIN
    )
    assert not released.is_fetched
    assert find_adapter("no model", refused) is None


def test_unknown_name(home: Path) -> None:
    done = run("fetch", "prose-8")
    assert done.exit_code == EXIT_BAD_INPUT
    assert "there are prose-9" in done.stderr
    assert not home.exists()


def test_a_system_without_locks(
    original: Path, model: Released, archive: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Windows has neither fcntl nor handles of folders."""
    monkeypatch.setattr("penstock.models.fetch.fcntl", None)
    fetch(model, tmp_path / "m", source=str(archive))
    assert is_whole(tmp_path / "m", original)


def test_a_broken_download_goes_on(
    original: Path, model: Released, site: Site, tmp_path: Path
) -> None:
    site.cut_at = 1000
    with pytest.raises(ModelLoadError, match=r"after 1,000 of .* run it again"):
        fetch(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    site.cut_at = 5000
    with pytest.raises(ModelLoadError, match="after 5,000 of"):
        fetch(model, tmp_path / "m")
    site.cut_at = None
    told: list[tuple[str, int, int]] = []
    fetch(model, tmp_path / "m", on_bytes=lambda *figures: told.append(figures))
    assert site.asked == ["", "bytes=1000-", "bytes=5000-"]
    assert is_whole(tmp_path / "m", original)
    assert told[0][0].startswith("downloading")
    assert told[-1][0].startswith("checking")
    assert told[-1][1] == told[-1][2] == model.bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_a_site_that_cannot_go_on_begins_again(
    original: Path, model: Released, site: Site, tmp_path: Path
) -> None:
    (tmp_path / f"{model.file}.partial").write_bytes(b"other bytes")
    site.ranges = False
    fetch(model, tmp_path / "m")
    assert is_whole(tmp_path / "m", original)


def test_a_reset(model: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(answer: Answer) -> None:
        answer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.close(answer.connection.detach())

    monkeypatch.setattr(Answer, "do_GET", reset)
    with pytest.raises(ModelLoadError, match=r"cannot fetch http.* run it again to go on"):
        fetch(model, tmp_path / "m")


@pytest.mark.parametrize("change", ["flipped", "longer", "shorter"])
def test_a_wrong_file_is_not_unpacked(
    model: Released, site: Site, tmp_path: Path, change: str
) -> None:
    content = bytearray(site.content)
    if change == "flipped":
        content[len(content) // 2] ^= 1
    site.content = bytes(content) + b"more" if change == "longer" else bytes(content)
    if change == "shorter":
        site.content = site.content[:-7]
    with pytest.raises(ModelLoadError) as caught:
        fetch(model, tmp_path / "m")
    said = str(caught.value)
    assert ("run it again" if change == "shorter" else TRAIN) in said
    assert ("SHA-256" in said) == (change == "flipped")
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([f"{model.file}.partial"] if change == "shorter" else [])


@pytest.mark.usefixtures("home")
def test_what_is_not_there_says_what_to_do(model: Released, site: Site, tmp_path: Path) -> None:
    site.status = 404
    done = run("fetch", "prose-9", "--to", tmp_path / "m")
    assert done.exit_code == EXIT_BAD_INPUT
    assert "404" in done.stderr
    assert TRAIN in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with pytest.raises(ModelLoadError, match=r"cannot fetch http://127\.0\.0\.1:1/"):
        fetch(replace(model, url="http://127.0.0.1:1/x"), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"http://\[::1/x is no address"):
        fetch(model, tmp_path / "m", source="http://[::1/x")
    with pytest.raises(ConfigError, match=r"give --from with prose-9\.tar\.xz, or train it"):
        fetch(replace(model, url=""), tmp_path / "m")
    with pytest.raises(ModelLoadError, match="there is no ~nobody-here/file"):
        fetch(model, tmp_path / "m", source="~nobody-here/file")
    assert not (tmp_path / "m").exists()


def test_from_an_archive_or_its_folder(
    original: Path, model: Released, archive: Path, site: Site, tmp_path: Path
) -> None:
    fetch(model, tmp_path / "one", source=str(archive))
    fetch(model, tmp_path / "two", source=str(archive.parent))
    fetch(model, tmp_path / "three", source=f"http://127.0.0.1:{site.server_port}/some/")
    assert all(is_whole(tmp_path / name, original) for name in ("one", "two", "three"))
    assert archive.exists()
    with pytest.raises(ConfigError, match="there already"):
        fetch(model, tmp_path / "one", source=str(archive))
    damaged = tmp_path / "damaged.tar.xz"
    damaged.write_bytes(archive.read_bytes()[:-1] + b"\0")
    with pytest.raises(ModelLoadError, match="SHA-256"):
        fetch(model, tmp_path / "four", source=str(damaged))
    assert damaged.exists(), "what is the user's is not deleted"


@pytest.mark.parametrize(
    "name", ["../evil", "prose-9/../../evil", "/evil", "prose-9/a/b", "other/x", "link"]
)
def test_nothing_is_written_outside(model: Released, tmp_path: Path, name: str) -> None:
    packed = io.BytesIO()
    with lzma.open(packed, "wb") as file, tarfile.open(fileobj=file, mode="w") as members:
        for one in ("prose-9/config.json", name):
            member = tarfile.TarInfo(one)
            if name == "link" and one == name:
                member.name, member.type, member.linkname = "prose-9/x", tarfile.SYMTYPE, "/etc"
            members.addfile(member)
    path = tmp_path / "evil.tar.xz"
    path.write_bytes(packed.getvalue())
    wrong = replace(
        model, bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )
    with pytest.raises(ModelLoadError, match="no file of a model"):
        fetch(wrong, tmp_path / "deep" / "m", source=str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "evil.tar.xz"]
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize("content", [b"nothing", lzma.compress(b"nothing"), b""])
def test_what_is_no_archive(model: Released, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    wrong = replace(model, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(ModelLoadError, match="no archive of a model"):
        fetch(wrong, tmp_path / "m", source=str(path))


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.models import fetch
from penstock.models.released import Released
real = os.rename
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = die
name, file, size, digest, source, target = sys.argv[1:]
one = Released(name=name, file=file, bytes=int(size), sha256=digest, files=9,
               unpacked_bytes=1 << 30, url="", train="t")
fetch.fetch(one, Path(target), source=source)
"""


def test_killed_before_the_renaming(
    original: Path, model: Released, archive: Path, tmp_path: Path
) -> None:
    target = tmp_path / "m"
    words = [model.name, model.file, str(model.bytes), model.sha256, str(archive), str(target)]
    command = [sys.executable, "-c", KILLED, *words]  # needs no torch, which takes seconds
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    assert len(list(tmp_path.iterdir())) == 1
    fetch(model, target, source=str(archive))
    assert is_whole(target, original)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
