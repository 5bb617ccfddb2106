"""The JSON file of a tuned config: written whole or not at all, read with every mistake named."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from penstock.core.atomic_write import json_kind, write_atomically
from penstock.core.errors import ConfigError, StorageError
from penstock.core.plain_data import fits
from penstock.core.regular_file import read_regular_text

FORMAT = "penstock-config-1"
_FAMILY = "penstock-config-"
CONFIG = json_kind("config of penstock tune", _FAMILY)


def write_config(text: str, path: Path) -> None:
    """Write a file, or leave the old one as it is.

    Raises:
        StorageError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise StorageError(f"cannot write the config to {path}: that is not a file")
    try:
        write_atomically(text, path)
    except OSError as error:
        raise StorageError(f"cannot write the config to {path}: {error.strerror}") from error


def read_document(path: Path) -> dict[str, Any]:
    """The file's JSON object.

    Raises:
        ConfigError: there is none, or it is not one of ours.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the file that penstock tune wrote")
    try:
        content = json.loads(read_regular_text(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no config {path}; run penstock tune MODEL -o {path}"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON; give the file that penstock tune wrote") from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(found, str) or not found.startswith(_FAMILY):
        raise ConfigError(f"{path} is no config; give the file that penstock tune wrote")
    if found != FORMAT:
        versions = content.get("versions")
        version = versions.get("penstock", "") if isinstance(versions, dict) else ""
        maker = f"penstock {version}" if isinstance(version, str) and version else "another version"
        raise ConfigError(
            f"{path} was made by {maker} in format {found}, and this one reads {FORMAT}; run "
            "penstock tune again"
        )
    assert isinstance(content, dict)
    return content


def checked(
    kind: type, content: Mapping[str, Any], where: str, besides: Sequence[str] = ()
) -> dict[str, Any]:
    """A record's fields out of a JSON object; what is not a field is passed over.

    Args:
        kind: the record's dataclass; records in it are left to another call.
        where: what the object is part of, for the message.
        besides: fields that are not in the file.

    Raises:
        ConfigError: a field is missing or of another type.
    """
    hints = get_type_hints(kind)
    names = [each.name for each in dataclasses.fields(kind) if each.name not in besides]
    missing = [name for name in names if name not in content]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; run penstock tune again")
    for name in names:
        if not fits(content[name], hints[name]):
            shown = repr(content[name])
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise ConfigError(f"{where}: {name}={shown} makes no sense; run penstock tune again")
    return {name: content[name] for name in names}
