"""Disks that fail, are slow or vanish while a model reads rows."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from contract import checked_message, refused
from faulty_disk import READS, Failing, flip_bits, slow, watch
from installed import ROOT
from loading import load_fixed

from stem_edge.errors import BundleError, RowReadError
from stem_edge.runtime.model import Model

PROMPT = list(range(3, 40, 3))
NEW_TOKENS = 6
SLOTS = 24  # few for 300 records, so that rows are read all the time
MAX_CALLS = 500
# What one process writes into a file and another reads needs a date; one out of bounds does not count.
NOT_APPLICABLE: dict[str, str] = {
    "D8": "Records are read and never mapped, so mapping their shards cannot fail.",
    "D9 X8": "No run writes how often rows were used.",
}
DATES = {"folder.py", "options.py", "prepacked.py", "service.py"}


def load(bundle: Path, **options: object) -> Model:
    """Load a model that must read rows all the time."""
    return load_fixed(bundle, slots=SLOTS, threads=1, **options)  # type: ignore[arg-type]


def generate(model: Model) -> list[int]:
    """Generate greedily."""
    chunks = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> list[int]:
    """The tokens that are generated on a good disk."""
    with load(tiny_bundle) as model:
        return generate(model)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("for_ever", [False, True])
def test_d5_the_kth_read_fails_in_a_generation(
    for_ever: bool, overlap: bool, tiny_bundle: Path, expected: list[int]
) -> None:
    """Every k gives the right tokens or an error, and the model still works."""
    errors = 0
    for at in range(MAX_CALLS):
        with load(tiny_bundle, overlap=overlap) as model:
            failing = Failing(at, errno.EIO, for_ever=for_ever)
            with pytest.MonkeyPatch.context() as patch:
                watch(patch, ["pread"], failing)
                try:
                    assert generate(model) == expected
                except RowReadError as error:
                    checked_message(str(error), "record ", "c/0/0", "at byte")
                    errors += 1
            assert generate(model) == expected
        if not failing.failed:
            break
    assert at > 10
    # A single failure is retried. A lasting one is reported unless the row was not needed.
    assert errors == 0 if not for_ever else errors >= at - 1


def test_d5_a_wrong_bit_that_is_read_once_is_read_again(
    tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tiny_bundle) as model:
        with monkeypatch.context() as patch:
            seen = flip_bits(patch, once=True)  # of every record, the first time
            assert generate(model) == expected
        assert len(seen) > 10
    with load(tiny_bundle) as model:
        flip_bits(monkeypatch, once=False)
        with pytest.raises(RowReadError, match=r"record \d+ at byte \d+: its crc32c is"):
            generate(model)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_d6_slow_reads_give_the_same_tokens(
    overlap: bool, tiny_bundle: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read takes 50 ms longer."""
    with load(tiny_bundle, overlap=overlap) as model:
        slow(monkeypatch, ["pread"], 0.05)
        assert generate(model) == expected


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ESTALE, errno.ENXIO])
def test_d7_a_medium_that_is_gone_is_reported_and_may_come_back(
    number: int, tiny_bundle: Path, expected: list[int]
) -> None:
    """The process and other models go on, and loading again works."""
    with load(tiny_bundle) as model:
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, READS, Failing(0, number, for_ever=True))
            for _ in range(2):
                refused(lambda: generate(model), RowReadError, os.strerror(number), "storage")
            refused(lambda: load(tiny_bundle), BundleError, tiny_bundle)
        assert generate(model) == expected
    with load(tiny_bundle) as again:
        assert generate(again) == expected


def test_d10_no_duration_is_taken_from_a_clock_that_jumps() -> None:
    """The whole package uses only monotonic clocks for durations."""
    calls = 0
    for folder in ("stem_edge", "export", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            assert path.name in DATES or not re.search(r"\btime\.(time|time_ns|localtime)\b", text)
            calls += len(re.findall(r"\btime\.(?:perf_counter|monotonic)\b", text))
    assert calls > 3
