"""Which lines of some modules a call reaches, by Python's own tracing: slow, so for a few calls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

Line: TypeAlias = tuple[str, int]


def source_files(modules: Iterable[str]) -> list[str]:
    """Files of imported modules, as tracebacks name them."""
    return [str(sys.modules[name].__file__) for name in modules]


def all_lines(files: Iterable[str]) -> set[Line]:
    """Lines of functions; what a module runs when it is imported is not counted."""
    found: set[Line] = set()
    for file in files:
        stack = [compile(Path(file).read_text("utf-8"), file, "exec")]
        while stack:
            for inner in stack.pop().co_consts:
                if isinstance(inner, CodeType):
                    stack.append(inner)
                    if inner.co_flags & 0x2:  # its variables are local: no body of a class
                        first = inner.co_firstlineno
                        lines = {line for *_, line in inner.co_lines() if line and line != first}
                        found |= {(file, line) for line in lines}
    return found


def reached(call: Callable[[], object], files: Iterable[str]) -> set[Line]:
    """Lines of these files that a call runs; whatever it raises is dropped."""
    wanted, seen = frozenset(files), set[Line]()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in wanted:
            return None
        if event == "line":
            seen.add((file, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):
            call()
    finally:
        sys.settrace(before)
    return seen
