"""Fetch a released model: download with resume, check the sum, unpack, put in place by renaming.

Killed at any moment, it leaves either the whole model or none; a download goes on where it ended.
"""

import contextlib
import hashlib
import http.client
import importlib
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError, ModelLoadError, StorageError
from penstock.core.regular_file import open_regular
from penstock.models.released import Released
from penstock.models.unpack import ArchiveError, unpack

fcntl: Any
try:
    fcntl = importlib.import_module("fcntl")
except ImportError:  # Windows: neither locks nor handles of folders
    fcntl = None

_PIECE = 1 << 20
_TIMEOUT_S = 30.0
_SCHEMES = ("http", "https")
OnBytes = Callable[[str, int, int], None]
"""Takes what is being done, bytes done and bytes in all."""


def fetch(
    released: Released, target: Path, *, source: str = "",
    on_bytes: OnBytes = lambda what, done, total: None,
) -> None:  # fmt: skip
    """Put a released model into a folder.

    Args:
        released: which one.
        target: the model's folder; must not be there, or be empty.
        source: an address, the archive, or a folder that holds it; empty: the model's own address.
        on_bytes: called with the progress.

    Raises:
        ConfigError: no source, one that cannot be, or the target is there already.
        ModelLoadError: the archive is not there, cannot be fetched, or is not what it should be.
        StorageError: it cannot be written.
    """
    source = source or released.url
    if not source:
        raise ConfigError(
            f"{released.name} has no address of its own; give --from with {released.file}, or "
            f"train it: {released.train}"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already; remove it, or give another --to")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target):
            if _is_address(source):
                archive = target.parent / f"{released.file}.partial"
                _download(released, _address(source, released), archive, on_bytes)
                _install(released, archive, target, on_bytes, remove=True)
                archive.unlink()
            else:
                _install(released, _local(source, released), target, on_bytes, remove=False)
    except (ConfigError, ModelLoadError):
        raise
    except OSError as error:
        what = error.strerror or error
        raise StorageError(f"cannot write {error.filename or target}: {what}") from error


@contextlib.contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Keep other processes from fetching to the same place, and clear up after a killed one."""
    if fcntl is None:
        yield
        return
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in target.parent.glob(f".{target.name}.unpacking-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"another process is fetching into {target.parent}; wait for it"
        ) from None
    finally:
        os.close(handle)


def _is_address(source: str) -> bool:
    try:
        return urlsplit(source).scheme in _SCHEMES
    except ValueError as error:
        raise ConfigError(f"{source} is no address: {error}") from error


def _address(source: str, released: Released) -> str:
    return f"{source}{released.file}" if source.endswith("/") else source


def _local(source: str, released: Released) -> Path:
    path = Path(os.path.expanduser(source.removeprefix("file://")))
    if os.path.isdir(path):
        path = path / released.file
    if not os.path.exists(path):
        raise ModelLoadError(f"there is no {path}; {_instead(released)}")
    return path


def _download(released: Released, address: str, partial: Path, on_bytes: OnBytes) -> None:
    """Append what is missing of the archive."""
    have = partial.stat().st_size if partial.exists() else 0
    if have > released.bytes:
        partial.unlink()
        have = 0
    if have == released.bytes:
        return
    headers = {"User-Agent": "penstock"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            goes_on = answer.status == 206 and _starts_at(answer, have)
            have = have if goes_on else 0
            with partial.open("ab" if goes_on else "wb") as file:
                _copy(answer, file, released, have, on_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # what is here already is no beginning of what is there
            partial.unlink(missing_ok=True)
        raise ModelLoadError(
            f"{address} answers {error.code} {error.reason}; {_instead(released)}"
        ) from error
    except (
        urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError
    ) as error:  # fmt: skip
        reason = getattr(error, "reason", error)
        raise ModelLoadError(
            f"cannot fetch {address}: {reason}; run it again to go on, or {_instead(released)}"
        ) from error
    have = partial.stat().st_size
    if have < released.bytes:
        raise ModelLoadError(
            f"the connection ended after {have:,} of {released.bytes:,} bytes; run it again to go "
            "on from there"
        )


def _starts_at(answer: Any, first: int) -> bool:
    return str(answer.headers.get("Content-Range", "")).startswith(f"bytes {first}-")


def _copy(
    answer: Any, file: IO[bytes], released: Released, have: int, on_bytes: OnBytes
) -> None:  # fmt: skip
    """Write what comes, up to one byte more than there should be."""
    while have <= released.bytes:
        try:
            piece = answer.read(min(_PIECE, released.bytes + 1 - have))
        except (ConnectionError, TimeoutError, http.client.IncompleteRead):
            return  # told by the size
        if not piece:
            return
        file.write(piece)
        have += len(piece)
        on_bytes(f"downloading {released.file}", min(have, released.bytes), released.bytes)


def _install(
    released: Released, archive: Path, target: Path, on_bytes: OnBytes, *, remove: bool
) -> None:  # fmt: skip
    """Check an archive and unpack it, both from one open file, whatever its name leads to later.

    Args:
        remove: the archive, where it is not what it should be.
    """
    try:
        with open_regular(archive) as file:
            name = archive.name if remove else str(archive)
            _require(
                released, name, os.fstat(file.fileno()).st_size, _sum(released, file, on_bytes)
            )
            file.seek(0)
            unpack(released, file, target, name)
    except ArchiveError as error:
        if remove:
            archive.unlink(missing_ok=True)
        raise ModelLoadError(str(error)) from error
    except OSError as error:
        if error.filename in (archive, str(archive)):
            raise ModelLoadError(f"{archive} cannot be read: {error.strerror}") from error
        raise


def _sum(released: Released, file: IO[bytes], on_bytes: OnBytes) -> str:
    """The sum of a file that has the right size; of another one it makes no difference."""
    digest, done, size = hashlib.sha256(), 0, os.fstat(file.fileno()).st_size
    while size == released.bytes and (piece := file.read(_PIECE)):
        digest.update(piece)
        done += len(piece)
        on_bytes(f"checking {released.file}", done, size)
    return digest.hexdigest()


def _require(released: Released, name: str, size: int, digest: str) -> None:
    """Refuse an archive that is not the released one."""
    if size == released.bytes and digest == released.sha256:
        return
    problem = f"its SHA-256 is {digest}, not {released.sha256}"
    if size != released.bytes:
        problem = f"it has {size:,} bytes, not {released.bytes:,}"
    raise ArchiveError(
        f"{name} is damaged or another file: {problem}; fetch it again, or train the model: "
        f"{released.train}"
    )


def _instead(released: Released) -> str:
    return f"give --from with a copy of {released.file}, or train the model: {released.train}"
