"""Progress on stderr: a bar with the time left, lines without a terminal, and a status line."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

LAYERS = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} layers, {remaining} left"
LINE_AFTER, LINE_EVERY = 2.0, 10.0  # seconds of a part until its first line, and between lines


class Progress:
    """Progress bar as a context manager; `advance` may be called from any thread.

    show: True shows a bar, False shows nothing. None shows a bar on a terminal; elsewhere it prints a few
        lines a minute about long parts. The other arguments are those of `begin`.
    """

    def __init__(self, total_nbytes: int, what: str, show: bool | None, *, layers: int = 0) -> None:
        self._visible = sys.stderr.isatty() if show is None else show
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._start(what, total_nbytes, layers)
        if show is None and not self._visible:
            threading.Thread(target=self._tell_lines, daemon=True).start()

    def begin(self, what: str, total_nbytes: int = 0, *, layers: int = 0) -> None:
        """Begin another part of the work, with its own estimate of the time left.

        what: name of the part in the bar. total_nbytes: its size; 0: unknown. layers: number of its layers,
        to show progress in layers; 0: in bytes.
        """
        with self._lock:
            self._bar.close()
            self._start(what, total_nbytes, layers)

    def _start(self, what: str, total_nbytes: int, layers: int) -> None:
        self._what, self._layers, self._total, self._done = what, layers, total_nbytes, 0.0
        self._began = self._due = time.monotonic()
        self._due += LINE_AFTER
        self._scale = layers / total_nbytes if layers else 1
        from tqdm import tqdm  # only here, because the import takes long

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
        with self._lock:
            self._done += nbytes
            self._bar.update(nbytes * self._scale)

    def _tell_lines(self) -> None:
        told = ""
        while not self._ended.wait(LINE_AFTER / 4):
            with self._lock:
                if (now := time.monotonic()) < self._due or self._ended.is_set():
                    continue
                self._due = now + LINE_EVERY  # from now, because this process may have been stopped
                if (line := self._line()) != told:
                    tell(line)
                told = line

    def _line(self) -> str:
        share = min(self._done / self._total, 1) if self._total else 0
        if not share:
            return self._what
        at = f"{share:.0%}"
        if self._layers:
            at = f"layer {int(share * self._layers)} of {self._layers}"
        if share == 1:  # all bytes are done, but the part may go on for an unknown time
            return f"{self._what}: {at}"
        left = duration((time.monotonic() - self._began) * (1 - share) / share)
        return f"{self._what}: {at}, about {left} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # so that no line follows
            self._ended.set()
        self._bar.close()


def show_status(status: str) -> None:
    """Write a status line to a terminal, over the previous status line; "" removes it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{status}", end="", file=sys.stderr, flush=True)


def tell(line: str, show: bool | None = None) -> None:
    """Print "stem-edge: " and the line to stderr, unless show is False."""
    if show is not False:
        print(f"stem-edge: {line}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Format a rough time for people, like 35 s, 12 min or 3 h 5 min."""
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if hours < 2 else f"{hours} h {int(seconds % 3600 // 60)} min"
