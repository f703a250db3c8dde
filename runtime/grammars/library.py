"""llguidance, imported when a grammar is first used, and its errors in one line."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from stem_edge.errors import InputError
from stem_edge.text_table import printable

MAX_REASON = 300  # characters; the library's messages repeat the grammar


def library() -> Any:
    """Return the module. Raises InputError that says how to install it."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise InputError(
            "schema, regex and grammar need llguidance; install it: pip install 'stem-edge[grammar]'"
        ) from None


def one_reason(message: str) -> str:
    """Return a message of the library in one line, without the stack and the grammar's text."""
    message = re.split(r"<backtrace>|\n\s*\d+ \| |; following special tokens", message)[0]
    return printable(" ".join(message.split())[:MAX_REASON])
