"""Texts that commands read from files and from stdin."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from stem_edge.errors import InputError


def read_text(path: Path | None, what: str, most: int) -> str:
    """Return the text of a file, or of stdin for None, of at most `most` characters.

    Raises InputError, which says `what` it is.
    """
    place = path or "stdin"
    try:
        with nullcontext(sys.stdin) if path is None else path.open(encoding="utf-8") as file:
            text = str(file.read(most + 1))
    except OSError as error:
        raise InputError(f"{place}: cannot read ({error.strerror}); give another file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not valid UTF-8 ({error}); give the {what} as UTF-8") from None
    if len(text) > most:
        raise InputError(f"{place}: more than {most:,} characters; shorten the {what}")
    return text
