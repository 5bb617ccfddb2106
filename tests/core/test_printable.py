"""Control characters are spelt out, all of them; what people write stays."""

import unicodedata

from penstock.core.printable import printable


def test_no_control_is_left() -> None:
    # The planes between have no character, those behind are of private use.
    everything = "".join(map(chr, (*range(0x40000), *range(0xE0000, 0xF0100))))
    left = printable(everything.replace("\r\n", ""))
    for character in set(left) - {"\n", "\t"}:
        assert unicodedata.category(character) != "Cc"
        assert unicodedata.bidirectional(character) not in (
            "LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI",
        )  # fmt: skip
    assert not {"\u200e", "\u200f", "\u061c", "\u2028", "\u2029", "\r"} & set(left)


def test_what_people_write_stays() -> None:
    for text in (
        "plain",
        "a\tb\nc\r\nd",
        "Grüße, 世界, שלום, السلام, 👩‍👩‍👧, e\u0301",
        "[red]",
        "\\x1b",
    ):
        assert printable(text) == text


def test_how_it_is_spelt() -> None:
    assert printable("\x1b]0;title\x07") == "\\x1b]0;title\\x07"
    assert printable("a\rb\x9b\u202e") == "a\\x0db\\x9b\\u202e"
