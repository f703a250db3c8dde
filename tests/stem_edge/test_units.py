"""Sizes in bytes: parsing and formatting."""

from typing import Any

import pytest

from stem_edge.errors import InputError
from stem_edge.shown import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *[(600_000_000, 600_000_000), ("600000000", 600_000_000), ("1B", 1), ("1 b", 1)],
        *[("512k", 512_000), ("512kB", 512_000), ("1KiB", 1024), ("1ki", 1024)],
        *[("600MB", 600_000_000), ("2MiB", 2 << 20), ("2 GiB", 2 << 30), ("1.5 GiB", 3 << 29)],
        *[("1.5g", 1_500_000_000), ("  7 MB  ", 7_000_000), ("0.001k", 1)],
        # Written in decimals, wanted to the byte: 1.001 is a little less in binary.
        *[("1.001MB", 1_001_000), ("0.29k", 290)],
    ],
)
def test_sizes_as_people_write_them(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "B", "MB", "ten", "1e9", "1,5GB", "1.GB", ".5GB", "-1", "-1GB", "+1", "1 G B"],
        *["1TiBs", "1GB 2MB", "0", "0GB", "nan", "0x10", "9" * 400, 0, -1, 4e7],
    ],
)
def test_sizes_refused(text: Any) -> None:
    with pytest.raises(InputError, match="is not understood; write for example 600MB or 2GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *[(0, "0 B"), (1, "1 B"), (999, "999 B"), (999.5, "1 kB"), (1000, "1 kB")],
        *[(1234, "1.23 kB"), (42_500, "42.5 kB"), (999_499, "999 kB"), (999_500, "1 MB")],
        *[(600_000_000, "600 MB"), (999_499_999, "999 MB"), (5_300_000_000, "5.3 GB")],
        *[(999_000_000_000, "999 GB"), (5_300_000_000_000, "5.3 TB"), (-1234, "-1.23 kB")],
    ],
)
def test_sizes_for_people(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text
