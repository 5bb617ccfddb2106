"""Names of stored documents: what may be a folder's name on every system, and nothing else."""

import re

from penstock.core.errors import ConfigError

MAX_NAME_LETTERS = 100
SETTINGS_FILE = "library-settings.json"
WRITES_FILE = "writes.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul"] + [f"{port}{n}" for port in ("com", "lpt") for n in range(10)]
)
_TAKEN = frozenset([SETTINGS_FILE, WRITES_FILE])
"""Files of the library itself."""


def check_name(name: str) -> str:
    """A document's name, if it may be one.

    Windows gives a device for its name with any ending ("nul.txt"), and drops a dot at the end.

    Raises:
        ConfigError: it may not; says what is allowed.
    """
    if not name:
        raise ConfigError("a document's name is empty; give it letters or digits")
    shown = repr(name if len(name) <= 60 else f"{name[:60]}...")
    if len(name) > MAX_NAME_LETTERS:
        raise ConfigError(
            f"the document name {shown} has {len(name)} letters; it may have {MAX_NAME_LETTERS}"
        )
    if _NAME.fullmatch(name) is None or ".." in name or name.endswith("."):
        raise ConfigError(
            f"{shown} cannot be a document's name: letters a-z, digits, '.', '_' and '-' are "
            "allowed, a letter or digit comes first, no '..' and no '.' at the end"
        )
    if name.lower().partition(".")[0] in _DEVICES or name.lower() in _TAKEN:
        raise ConfigError(f"{shown} cannot be a document's name: it is reserved; give another")
    return name


def is_name(name: str) -> bool:
    """Whether `check_name` takes it."""
    try:
        check_name(name)
    except ConfigError:
        return False
    return True
