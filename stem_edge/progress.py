"""Progress on stderr: a bar of bytes with the time left, and a status line."""

from __future__ import annotations

import sys
import threading
from typing import Self

from tqdm import tqdm


class Progress:
    """Progress bar as a context manager; `advance` may be called from any thread.

    show: False for never, True for always, None for only on a terminal.
    """

    def __init__(self, total_nbytes: int, what: str, show: bool | None) -> None:
        visible = sys.stderr.isatty() if show is None else show
        self._lock = threading.Lock()
        self._bar = tqdm(
            total=total_nbytes,
            desc=what,
            unit="B",
            unit_scale=True,
            disable=not visible,
            leave=False,
            dynamic_ncols=True,
        )

    def advance(self, nbytes: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self._bar.update(nbytes)

    def describe(self, what: str) -> None:
        """Change the text before the bar."""
        self._bar.set_description(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def show_status(what: str) -> None:
    """Print a line that the next one overwrites, if stderr is a terminal; "" removes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def tell(what: str, show: bool | None = None) -> None:
    """Print a line that stays, on stderr; show: False for not."""
    if show is not False:
        print(f"stem-edge: {what}", file=sys.stderr, flush=True)
