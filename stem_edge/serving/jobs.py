"""Other work of the compute thread than answers, such as scores of given texts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from stem_edge.errors import StemEdgeError


class ServerJob:
    """Work done a piece at a time: an iterator; `future` becomes the list of its pieces.

    The iterator yields None while it waits; None is left out of the list.
    The compute thread alone calls `step` and `fail`.
    """

    def __init__(self, work: Iterator[Any]) -> None:
        self.future: Future[list[Any]] = Future()
        self.cancelled = False  # set by any thread
        self._work, self._found = work, list[Any]()

    def step(self) -> bool:
        """Do a piece; tell whether there may be more."""
        if self.cancelled:
            self._close()
            return False
        try:
            if (piece := next(self._work)) is not None:
                self._found.append(piece)
        except StopIteration:
            self._set(self._found)
        except Exception as error:  # ends this work alone
            self._set(error)
        else:
            return True
        return False

    def fail(self, error: StemEdgeError) -> None:
        """End it with an error."""
        self._close()
        self._set(error)

    def _close(self) -> None:
        if (close := getattr(self._work, "close", None)) is not None:
            close()

    def _set(self, result: list[Any] | Exception) -> None:
        with suppress(InvalidStateError):  # cancelled: no caller waits any more
            if isinstance(result, list):
                self.future.set_result(result)
            else:
                self.future.set_exception(result)
