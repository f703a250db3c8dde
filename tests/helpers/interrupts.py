"""Interrupt a call before any of its lines, to show that the moment does not matter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupted(call: Callable[[], object], at: int, within: Callable[[CodeType], bool]) -> bool:
    """Raise KeyboardInterrupt before the `at`-th line (from 0) that runs in code chosen by `within`.

    Returns False if fewer lines ran, so that the call ended by itself.
    """
    left, raised = at, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, raised
        if not within(frame.f_code):
            return None
        if event == "line":
            left -= 1
            if left < 0 and not raised:
                raised = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return raised
