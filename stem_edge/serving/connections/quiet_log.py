"""A log that does not grow with the number of equal errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

SECONDS = 60.0
# Logger, place that logs, and type and place of the error: as many as the program has.
Cause: TypeAlias = tuple[object, ...]


class QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, of each cause once a minute, and how often it was there meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._written = dict[Cause, float]()
        self._left_out = dict[Cause, int]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless one of its cause was written within the last minute."""
        cause, now = cause_of(record), time.monotonic()
        if now - self._written.get(cause, -SECONDS) < SECONDS:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return
        self._written[cause] = now
        if (count := self._left_out.pop(cause, 0)) > 0:
            record.msg = f"{record.getMessage()} (and {count:,} times before)"
            record.args = None
        super().emit(record)


def cause_of(record: logging.LogRecord) -> Cause:
    """Return what makes a record another one than those before."""
    place: Cause = (record.name, record.pathname, record.lineno)
    if not record.exc_info or record.exc_info[0] is None:
        return place
    kind, _, trace = record.exc_info
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (*place, kind, trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno))


@contextmanager
def quiet_log() -> Iterator[None]:
    """Write the log of all libraries this way until the block ends."""
    handler, root = QuietHandler(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
