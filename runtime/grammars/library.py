"""Imports llguidance when the first grammar is used, and shortens its errors to one line."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from stem_edge.errors import InputError
from stem_edge.shown import printable

T = TypeVar("T")
MAX_REASON = 300  # characters; the library's messages repeat the grammar
# Bytes of address space. The library follows references by recursion: with 8 MiB, a chain of 1,000
# definitions ends the process; with 64, chains of 10,000 did not (MAX_LINKS is half of that).
STACK_NBYTES = 128 << 20
MAX_LINKS = 5_000  # references of a schema; MAX_LARK bounds rules
# Characters. Sequences of optional parts take time that grows with the square of their length: a
# second or a few for this many.
MAX_REGEX, MAX_LARK = 1 << 14, 1 << 15
_starting = threading.Lock()  # because threading.stack_size is for the whole process


def library() -> Any:
    """Import and return llguidance. If it is missing, raises InputError with its install command."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise InputError(
            "schema, regex and grammar need llguidance; install it: pip install 'stem-edge[grammar]'"
        ) from None


def one_reason(message: str) -> str:
    """Reduce an llguidance error message to one line, without stack trace and grammar text."""
    message = re.split(r"<backtrace>|\n[ \t]*+\d++ \| |; following ", message)[0]
    message = " ".join(message.split())
    if len(message) > 2 * MAX_REASON:  # the reason is at the end; short texts are fast to search
        message = message[:MAX_REASON] + message[-MAX_REASON:]
    message = message.replace(" <non-verbose/>", "").replace("NoExtensionBias", "no text matches")
    return printable(message[:MAX_REASON])


@contextmanager
def panics_refused(what: str) -> Iterator[None]:
    """Convert errors of llguidance in this block to InputError, whose message begins with `what`.

    llguidance's panics derive from BaseException, so `except Exception` in a caller would miss them.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InputError(f"{what} ({one_reason(str(error))}); give another") from None


def guarded(call: Callable[[], T], what: str) -> T:
    """Run `call`, which compiles a grammar, in a thread with a large stack; return its result.

    Raises InputError, whose message begins with `what`, if llguidance raises an error or panics.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK_NBYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    with panics_refused(f"{what}: cannot be compiled"):
        return future.result()
