"""Check that a fault ends in a helpful refusal, with nothing lost.

A refusal is a typed error of one line that names the place, what was found and what to do, and comes
within seconds. On the command line it is the same line and exit status 1. Existing files stay as they
were.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from stem_edge.commands.main import main
from stem_edge.errors import BundleError, StemEdgeError

T = TypeVar("T")
REFUSAL_SECONDS = 10.0
MAX_MESSAGE_CHARS = 2000
# Verbs by which messages say what to do. Every message must have one of them.
REMEDY = re.compile(
    r"\b(add|check|choose|convert|copy|delete|expected|export|fetch|free|give|install|leave|load|"
    r"lower|make|move|raise|remove|rename|report|restore|run|shorten|split|try|upgrade|use|wait)\b"
)


def refused(
    call: Callable[[], object],
    error: type[StemEdgeError],
    *naming: str | Path,
    kept: Sequence[Path] = (),
    seconds: float = REFUSAL_SECONDS,
) -> str:
    """Check that a call is refused, and return the message.

    naming: parts that the message must have; kept: files and folders that must stay the same.
    """
    with _unchanged(kept, seconds), pytest.raises(error) as caught:
        call()
    return checked_message(str(caught.value), *naming)


def takes(call: Callable[[int], object], most: int, said: str) -> None:
    """Check that `most` is accepted and that one more is refused in these words."""
    call(most)
    with pytest.raises((BundleError, ValueError), match=said) as caught:
        call(most + 1)
    if isinstance(caught.value, BundleError):
        checked_message(str(caught.value))


def command_refused(
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str | Path],
    *naming: str | Path,
    kept: Sequence[Path] = (),
    seconds: float = REFUSAL_SECONDS,
) -> str:
    """Check that `stem-edge ARGUMENTS` is refused, and return the message."""
    with _unchanged(kept, seconds):
        assert main([str(argument) for argument in arguments]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("stem-edge: ")
    return checked_message(line, *naming)


@contextlib.contextmanager
def _unchanged(kept: Sequence[Path], seconds: float) -> Iterator[None]:
    before, started = [fingerprint(path) for path in kept], sum(os.times()[:4])
    yield
    assert sum(os.times()[:4]) - started < seconds  # of CPUs, which other processes do not change
    assert [fingerprint(path) for path in kept] == before


def checked_message(message: str, *naming: str | Path) -> str:
    """Check a message against the contract, and return it."""
    assert len(message.splitlines()) == 1, message
    assert len(message) <= MAX_MESSAGE_CHARS, message
    assert message.isprintable(), ascii(message)
    assert "Traceback" not in message
    for word in naming:
        assert str(word) in message, f"{word} is not in: {message}"
    assert REMEDY.search(message), f"does not say what to do: {message}"
    return message


def fingerprint(path: Path) -> dict[str, str]:
    """Map each name at and below a path to kind, size and checksum; times are ignored."""
    places = [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]
    return {place.relative_to(path).as_posix(): _contents(place) for place in places}


def _contents(place: Path) -> str:
    try:
        status = place.lstat()
    except FileNotFoundError:
        return "nothing"
    kind = stat.filemode(status.st_mode)
    if stat.S_ISREG(status.st_mode) and os.access(place, os.R_OK):
        return f"{kind} {status.st_size} {hashlib.sha256(place.read_bytes()).hexdigest()}"
    return f"{kind} {place.readlink() if place.is_symlink() else ''}"
