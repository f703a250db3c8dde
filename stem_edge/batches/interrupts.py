"""Ctrl-C between steps rather than in the midst of one, where Python can lose it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end if Ctrl-C came inside; the second one raises it at once.

    Python drops what is raised in a callback, such as that of a weak set one of whose members goes.
    Nothing changes in other threads than the main one, nor where Ctrl-C has a handler of its own.
    """
    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            raise KeyboardInterrupt
