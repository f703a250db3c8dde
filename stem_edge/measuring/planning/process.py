"""Memory of a process before it loads a model, measured in one that imports the same."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from stem_edge.graph.formats import EngineName
from stem_edge.system.memory import TYPICAL_PROCESS_NBYTES

IMPORTS: dict[EngineName, str] = {
    "onnxruntime": "stem_edge.runtime.backends.onnxruntime.loader",
    "ggml": "stem_edge.runtime.backends.ggml.loader",
}
MEASURE = (
    "import psutil, stem_edge.commands.generate, stem_edge.runtime.loading, {}\n"
    "from stem_edge.system.memory import own_memory\n"
    "print(own_memory())"
)
SECONDS = 60.0
# By which processes differ, and what a load opens before it plans.
SPARE_NBYTES = 2_000_000


@cache
def process_nbytes(engine: EngineName) -> int:
    """Return the anonymous bytes that `generate` takes before it loads.

    Where the engine is not installed, they are what is typical.
    """
    command = [sys.executable, "-c", MEASURE.format(IMPORTS[engine])]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return TYPICAL_PROCESS_NBYTES
    return int(done.stdout) + SPARE_NBYTES
