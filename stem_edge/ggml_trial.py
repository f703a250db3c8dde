"""Tries ggml in a process of its own: python -m stem_edge.ggml_trial LIBRARY.

Not a command for users: `stem_edge.ggml_check` starts it, and says why. Each step is a line of
stdout before it is computed, so that whoever started it can tell where it crashed; the last line is
the result as JSON. Otherwise stderr ends with a line that says what is wrong, and the exit status is
one of the two below.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stem_edge.child import limit_this_process
from stem_edge.errors import BackendError
from stem_edge.ggml import Ggml
from stem_edge.ggml_trial_steps import Result, Trial, WrongResultError, steps

DIFFERS, REFUSED = (
    10,
    11,
)  # (an abort on Windows is 3) exit status: a wrong result; Ggml refused the library
MEMORY_NBYTES = 1 << 30
CPU_SECONDS = 120  # should whoever waits for it be gone
REPACK, AMX = "CPU_REPACK", "AMX"


def run(path: Path) -> dict[str, object]:
    """Every step, with its name on stdout before. Raises BackendError, WrongResultError."""
    print("loading it", flush=True)
    began, ggml = time.perf_counter(), Ggml(path)
    trial, memory = Trial(ggml), ggml.extra_buffer_type(REPACK)
    counts = {name: check(name, results) for name, results in steps(trial, memory)}
    return {
        "ok": True,
        "version": ggml.version,
        "repack": memory is not None and 0 not in counts.values(),
        "amx": ggml.extra_buffer_type(AMX) is not None,
        "seconds": round(time.perf_counter() - began, 3),
    }


def check(step: str, results: Iterator[Result]) -> int:
    """Compare. Returns how many results there were. Raises WrongResultError."""
    print(step, flush=True)
    count = 0
    try:
        for found, expected, tolerance in results:
            count += 1
            a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
            distance = np.abs(a - b)
            worst = int(np.where(np.isnan(distance), np.inf, distance).argmax())
            if not distance[worst] <= tolerance * np.sqrt(np.mean(b * b)):
                where = f"value {worst} of {a.size}"
                raise WrongResultError(f"{where}: found {a[worst]:.6g}, expected {b[worst]:.6g}")
    except WrongResultError as error:
        raise WrongResultError(f"{step}: {error}") from error
    return count


def main() -> int:
    """See above."""
    limit_this_process(MEMORY_NBYTES, CPU_SECONDS)
    try:
        print(json.dumps(run(Path(sys.argv[1]))), flush=True)
    except (BackendError, WrongResultError) as error:
        print(error, file=sys.stderr)
        return REFUSED if isinstance(error, BackendError) else DIFFERS
    return 0


if __name__ == "__main__":
    sys.exit(main())
