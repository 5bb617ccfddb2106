"""Names of documents: what may be a folder on every system."""

import pytest

from penstock.core.errors import ConfigError
from penstock.storage.documents.names import MAX_NAME_LETTERS, check_name


@pytest.mark.parametrize(
    "name", ["a", "7", "War_and-Peace.v2", "x" * MAX_NAME_LETTERS, "console", "com10", "a.con"]
)
def test_good(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "..", "a..b", ".hidden", "-rf", "_x", "a/b", "/etc/passwd", "a\\b", "a b", "a\n", "\0", "é",
        "٣", "a:b", "a.", "C:", "~",
    ],
)  # fmt: skip
def test_letters(name: str) -> None:
    with pytest.raises(ConfigError, match="are allowed") as caught:
        check_name(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["con", "NUL", "Com1", "lpt9", "aux.txt", "prn.a.b", "writes.json", "Library-Settings.JSON"],
)  # fmt: skip
def test_reserved(name: str) -> None:
    with pytest.raises(ConfigError, match="reserved"):
        check_name(name)


def test_length() -> None:
    with pytest.raises(ConfigError, match="empty"):
        check_name("")
    with pytest.raises(ConfigError, match="101 letters; it may have 100") as caught:
        check_name("x" * 101)
    assert len(str(caught.value)) < 200
