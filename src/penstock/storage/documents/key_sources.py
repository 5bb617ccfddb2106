"""Where a library's key comes from: a file, an environment variable, or the system's keyring."""

import base64
import binascii
import contextlib
import importlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, StorageError

KEY_BYTES = 32
SOURCES = "file:PATH, env:NAME or keyring:SERVICE/USER"
_FORMS = f"{KEY_BYTES} random bytes, or the same as {2 * KEY_BYTES} hex digits or in base64"
_FILE_BYTES_MAX = 1024


def read_key(source: str, *, environment: Mapping[str, str]) -> bytes:
    """The key that a source names.

    A passphrase is not a key: nothing here stretches one.

    Args:
        source: "file:PATH" (32 raw bytes, 64 hex digits or base64), "env:NAME" or
            "keyring:SERVICE/USER" (hex or base64).
        environment: the environment's variables.

    Returns:
        32 bytes.

    Raises:
        ConfigError: no such source, or what is there is no key, or others may read it. No message
            shows a key, also where one was given in place of a source.
    """
    kind, _, place = source.partition(":")
    if kind == "file" and place:
        return _file_key(place)
    if kind == "env" and place:
        return _environment_key(place, environment)
    service, _, user = place.rpartition("/")
    if kind == "keyring" and service and user:
        return _keyring_key(service, user)
    raise ConfigError(f"a key comes from {SOURCES}; this is none of them")


def make_key_file(path: Path) -> None:
    """Write a new random key, in hex, to a new file that its owner alone may read.

    The key is on the disk when this returns: what is encrypted under it is lost without it.

    Raises:
        ConfigError: there is something of that name, or no folder for it.
        StorageError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already and may be the only key to something; give another name"
        ) from None
    except FileNotFoundError:
        raise ConfigError(f"there is no folder {path.parent} for a key; make it first") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot write a key to {path}: {_reason(error)}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES).hex().encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        _sync_folder(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"cannot write a key to {path}: {_reason(error)}") from error


def own_key(path: Path) -> bytes:
    """The key in a file, which is made where it is missing.

    Processes that begin at once find the same key; a crash leaves all of the file or none.

    Returns:
        32 bytes.

    Raises:
        ConfigError: there is no folder for it, it holds no key, or others may read it.
        StorageError: it cannot be written.
    """
    if not os.path.lexists(path):
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        make_key_file(fresh)
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            with contextlib.suppress(ConfigError):  # it is there by now
                make_key_file(path)
        finally:
            fresh.unlink(missing_ok=True)
        _sync_folder(path.parent)
    return _file_key(str(path))


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_key(place: str) -> bytes:
    path, shown = os.path.expanduser(place), _shown(place)
    # A pipe of that name must not hold us up.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key file {shown}: {_reason(error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the key file {shown} is not a file; give one with a key in it")
        if os.name != "nt" and status.st_mode & 0o077:
            raise ConfigError(
                f"the key file {shown} is open to others (mode {status.st_mode & 0o777:o}); "
                f"run chmod 600 on it, and make a new key if another user may have read it"
            )
        content = os.read(descriptor, _FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {shown}: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    if len(content) == KEY_BYTES and not (content.isascii() and _is_text(content)):
        return content
    key = _decoded(content.decode("latin-1")) if len(content) <= _FILE_BYTES_MAX else None
    if key is None:
        raise ConfigError(
            f"the key file {shown} holds no key; a key is {_FORMS}, never a passphrase"
        )
    return key


def _is_text(content: bytes) -> bool:
    """Whether bytes are a typed line; of 10^13 random keys, one is."""
    return content.decode("ascii").rstrip().isprintable()


def _environment_key(name: str, environment: Mapping[str, str]) -> bytes:
    value = environment.get(name)
    if value is None:
        raise ConfigError(f"there is no environment variable {_shown(name)} to take the key from")
    key = _decoded(value)
    if key is None:
        raise ConfigError(f"the environment variable {_shown(name)} holds no key; give {_FORMS}")
    return key


def _keyring_key(service: str, user: str) -> bytes:
    shown = f"{_shown(service)}/{_shown(user)}"
    try:
        keyring: Any = importlib.import_module("keyring")
    except ImportError:
        raise ConfigError(
            "a key from the keyring needs the library keyring; run pip install "
            "'penstock[keyring]', or give file:PATH or env:NAME"
        ) from None
    try:
        value = keyring.get_password(service, user)
    except Exception as error:  # each system's keyring has errors of its own
        raise ConfigError(
            f"the keyring did not give {shown} ({type(error).__name__}); unlock it, or give "
            "file:PATH or env:NAME"
        ) from None
    if value is None:
        raise ConfigError(
            f"the keyring has no {shown}; put a key there with keyring set SERVICE USER"
        )
    key = _decoded(value) if isinstance(value, str) else None
    if key is None:
        raise ConfigError(f"the keyring's {shown} is no key; give {_FORMS}")
    return key


def _decoded(text: str) -> bytes | None:
    """The key that hex digits or base64 (either alphabet, padded or not) stand for."""
    text = text.strip()
    if not text.isascii():
        return None
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text) if text.isalnum() else None
        code = text.rstrip("=").translate(str.maketrans("-_", "+/"))
        key = base64.b64decode(code + "=" * (-len(code) % 4), validate=True)
    except (ValueError, binascii.Error):
        return None
    return key if len(key) == KEY_BYTES else None


def _shown(place: str) -> str:
    """A place for a message, unless it is a key that was given in place of one."""
    return "(a key, not a name)" if _decoded(place) is not None else repr(place)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or "no such name can be"
