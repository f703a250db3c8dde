"""A log that does not grow with the number of equal errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

SECONDS = 60.0
# Logger, place that logs, and type and place of each logged error: as many as the program has.
Cause: TypeAlias = tuple[object, ...]


class QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, of each cause once a minute, and how often it was there meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._written = dict[Cause, float]()
        # How many since the last line, and the last of them: no record, which has objects of a request.
        self._left_out = dict[Cause, tuple[int, logging.LogRecord]]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless one of its cause was written within the last minute."""
        cause, now = cause_of(record), time.monotonic()
        count, _ = self._left_out.pop(cause, (0, record))
        if now - self._written.get(cause, -SECONDS) < SECONDS:
            last = {"levelname": record.levelname, "msg": record.getMessage()}
            self._left_out[cause] = (count + 1, logging.makeLogRecord(last))
            return
        self._written[cause] = now
        self._write(record, count)

    def write_left_out(self) -> None:
        """Write the last of each cause that was left out."""
        for count, last in self._left_out.values():
            self._write(last, count - 1)
        self._left_out.clear()

    def _write(self, record: logging.LogRecord, before: int) -> None:
        if before:
            record.msg = f"{record.getMessage()} (and {before:,} times before)"
            record.args = None
        super().emit(record)


def cause_of(record: logging.LogRecord) -> Cause:
    """Return what makes a record another one than those before."""
    told = [*(record.args or ()), *(record.exc_info or ())]
    errors = [(type(each), _place_of(each)) for each in told if isinstance(each, BaseException)]
    return (record.name, record.pathname, record.lineno, *errors)


def _place_of(error: BaseException) -> tuple[str, int] | None:
    """Return where an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Write the log of all libraries this way until the block ends."""
    handler, root = QuietHandler(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.write_left_out()
