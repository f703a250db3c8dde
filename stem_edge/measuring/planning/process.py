"""Memory of a process before it loads a model, measured in one that imports the same."""

from __future__ import annotations

import subprocess
from functools import cache

from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.system.child import code_command
from stem_edge.system.memory import TYPICAL_PROCESS_NBYTES

WORKER = "stem_edge.measuring.runs.worker"
GENERATE = "psutil, stem_edge.commands.running.generate, stem_edge.runtime.loading"
MEASURE = "import {}\nfrom stem_edge.system.memory import own_memory\nprint(own_memory())"
SECONDS = 60.0
# Processes differ by this, files opened before planning included: advice on --memory must suffice.
SPARE_NBYTES = 2_000_000


def worker_nbytes(engine: EngineName) -> int:
    """Return the anonymous bytes of a process that is measured, before it loads."""
    return _imported(f"{WORKER}, {ENGINES[engine].module}")


def generate_nbytes(engine: EngineName) -> int:
    """Return the anonymous bytes that `generate` takes at most before it loads."""
    return _imported(f"{GENERATE}, {ENGINES[engine].module}") + SPARE_NBYTES


@cache
def _imported(names: str) -> int:
    """Return the bytes of a process with these modules; what is typical if one is not installed."""
    command = code_command(MEASURE.format(names))
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return TYPICAL_PROCESS_NBYTES
