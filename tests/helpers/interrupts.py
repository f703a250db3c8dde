"""Interrupts before any line that a call runs: whatever the moment, no harm is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupted(call: Callable[[], object], at: int, within: Callable[[CodeType], bool]) -> bool:
    """Whether KeyboardInterrupt came before the `at`-th line, from 0 on, of the code that counts.

    False if the call has fewer lines; then it ran to its end.
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
