"""Calls in threads at the same time, and scripts in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from stem_edge import Model

T = TypeVar("T")
WATCHDOG_SECONDS = 300.0


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call in its own thread and return their results. Raises the first error."""
    results: list[T | None] = [None] * len(calls)
    errors: list[BaseException] = []
    gate = threading.Barrier(len(calls))

    def run(number: int) -> None:
        gate.wait(60)
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def tokens(model: Model, prompt: Sequence[int], count: int = 12) -> list[int]:
    """Generate greedily."""
    return [t for c in model.generate(prompt, max_new_tokens=count) for t in c.token_ids]


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, which a watchdog ends."""
    head = (
        f"import faulthandler; faulthandler.dump_traceback_later({WATCHDOG_SECONDS}, exit=True)\n"
    )
    command = [sys.executable, "-c", head + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
