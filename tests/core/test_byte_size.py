"""Sizes as people write them, and the refusal of what is not a size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.byte_size import enough_size, format_bytes, parse_bytes, parse_memory
from penstock.core.errors import ConfigError

FULL, FREE = 13_000, 10_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("65536", 65536), ("2147483648", 2 << 30), ("512B", 512), ("1KB", 1000), ("1K", 1024),
        ("1 KiB", 1024), ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000), (" 2gib ", 2 << 30), ("1TB", 10**12),
    ],
)  # fmt: skip
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1MB", "1 apple", "1e3", "1/2", "ten"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2", "write 2GiB"), (" 64 ", "write 64GiB"), ("512", "write 512MiB"),
        ("65535", "would be 65535 bytes"), ("1.5", "write 1.5GiB"),
        ("0.5", "write 0.5GiB, 1/2 or 50% for a share"),
    ],
)  # fmt: skip
def test_a_size_whose_unit_was_forgotten(text: str, said: str) -> None:
    for read in (parse_bytes, lambda memory: parse_memory(memory, FULL, FREE)):
        with pytest.raises(ConfigError, match=said):
            read(text)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (777, 777), (np.int64(777), 777), ("1/13", 1000), ("5%", 650), (0.5, 6500), (1.0, FULL),
        ("2KB", 2000), ("auto", 5000), (" AUTO ", 5000),
    ],
)  # fmt: skip
def test_parse_memory(memory: int | float | str, expected: int) -> None:
    assert parse_memory(memory, FULL, FREE) == expected


def test_auto_never_exceeds_the_full_cache() -> None:
    assert parse_memory("auto", 100, 10**9) == 100


@pytest.mark.parametrize("memory", [0, -5, 0.0, 1.5, -0.5, "0", "1/0", "0/3", "0%", True, "x"])
def test_impossible_memory(memory: int | float | str) -> None:
    with pytest.raises(ConfigError):
        parse_memory(memory, FULL, FREE)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"), (1000, "1000 B"), (1023, "1023 B"), (1024, "1 KiB"), (7_895_777, "7.53 MiB"),
        (1023 << 20, "1023 MiB"), ((1000 << 20) - 1, "1000 MiB"), (1_023_000, "999 KiB"),
        (5 << 40, "5 TiB"), (5000 << 40, "5000 TiB"),
    ],
)  # fmt: skip
def test_format_bytes(size: int, expected: str) -> None:
    assert format_bytes(size) == expected


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01, abs=1)


@given(st.integers(min_value=1, max_value=1 << 42))
def test_a_size_that_is_enough_is_read_back_as_enough(size: int) -> None:
    written = enough_size(size)
    assert size <= parse_bytes(written) <= size * 1.02 + 1024
    assert len(written) <= 10
