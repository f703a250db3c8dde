"""Progress of a batch, on stderr."""

from __future__ import annotations

import time

from stem_edge.batches.rows import Result
from stem_edge.progress import show_status
from stem_edge.units import duration, format_rate

SHOWN_SECONDS = 0.5


class Meter:
    """Counts rows, and shows how many are done if stderr is a terminal.

    total: rows, if that is known. show: None for on a terminal, False for never.
    """

    def __init__(self, total: int | None, show: bool | None) -> None:
        self.skipped = 0  # rows that were done before
        self.answered, self.failed, self.tokens = 0, 0, 0
        self.first_error: str | None = None
        self._total, self._show = total, show is not False
        self._begun, self._shown = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.perf_counter() - self._begun

    def begin(self) -> None:
        """Count time from here."""
        self._begun = time.perf_counter()

    def add(self, result: Result) -> None:
        """Count a result."""
        self.answered += not result.failed
        self.failed += result.failed
        if result.failed and self.first_error is None:
            self.first_error = f"line {result.line}: {result.why}"
        self.tokens += result.tokens
        if self._show and time.perf_counter() - self._shown > SHOWN_SECONDS:
            self._shown = time.perf_counter()
            show_status(self.line())

    def end(self) -> None:
        """Clear the line."""
        if self._show:
            show_status("")

    def line(self) -> str:
        """Return rows done, tokens a second, and the time left."""
        new, seconds = self.answered + self.failed, self.seconds
        done = self.skipped + new
        parts = [f"{done:,} rows" if self._total is None else f"{done:,}/{self._total:,} rows"]
        if self.failed:
            parts.append(f"{self.failed:,} errors")
        parts.append(f"{format_rate(self.tokens / seconds)} tokens/s")
        if self._total is not None and new:
            parts.append(f"{duration((self._total - done) * seconds / new)} left")
        return ", ".join(parts)
