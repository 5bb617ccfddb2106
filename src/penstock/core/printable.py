"""Text from outside: as it may stand on a terminal, and whether it is text at all."""

import re

from penstock.core.errors import PromptError

_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 and C1, which begin what a terminal obeys
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # reordering of what is written both ways
    r"\u2028\u2029]|\r(?!\n)"
)


def printable(text: str) -> str:
    r"""Text with its control characters spelt out, as in `\x1b`; lines and tabs stay.

    A terminal obeys such characters: they set its title, fill its clipboard, write over what was
    there, or show text in another order than it has.
    """
    return _CONTROL.sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def require_text(text: str, what: str) -> None:
    """Refuse text with halves of characters, as a shell's bytes that are not UTF-8 become.

    Raises:
        PromptError: says what it is.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not UTF-8 text") from error
