"""Progress on stderr: a bar of bytes or layers with the time left, and a status line."""

from __future__ import annotations

import sys
import threading
from typing import Self

from tqdm import tqdm

LAYERS = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} layers, {remaining} left"


class Progress:
    """Progress bar as a context manager; `advance` may be called from any thread.

    show: False for never, True for always, None for only on a terminal. The rest as for `begin`.
    """

    def __init__(self, total_nbytes: int, what: str, show: bool | None, *, layers: int = 0) -> None:
        self._visible = sys.stderr.isatty() if show is None else show
        self._lock = threading.Lock()
        self._start(what, total_nbytes, layers)

    def begin(self, what: str, total_nbytes: int = 0, *, layers: int = 0) -> None:
        """Begin another part of the work, whose time left is counted anew.

        total_nbytes: of the part; 0: nothing counts. layers: as many are shown instead of bytes.
        """
        with self._lock:
            self._bar.close()
            self._start(what, total_nbytes, layers)

    def _start(self, what: str, total_nbytes: int, layers: int) -> None:
        self._scale = layers / total_nbytes if layers else 1
        self._bar = tqdm(
            total=layers or total_nbytes,
            desc=what,
            unit="B",
            unit_scale=True,
            smoothing=0,  # the time left by all that is done, because speed changes within a layer
            bar_format=LAYERS if layers else None if total_nbytes else "{desc}",
            disable=not self._visible,
            leave=False,
            dynamic_ncols=True,
        )

    def advance(self, nbytes: float) -> None:
        """Count bytes as done."""
        with self._lock:
            self._bar.update(nbytes * self._scale)

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
