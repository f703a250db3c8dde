"""Models on ggml: interrupts, memory that is freed, quantized weights."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from installed import needs_ggml
from interrupts import interrupted
from loading import load_fixed
from threads import tokens

pytestmark = needs_ggml
IDS = np.random.default_rng(0).integers(0, 256, 100).tolist()


def test_an_interrupted_step_leaves_no_graph_over_memory_that_is_gone(tiny_gguf: Path) -> None:
    """A larger graph needs new scratch memory; the step can be repeated after any interrupt."""
    with load_fixed(tiny_gguf, threads=1) as model:
        short, long = tokens(model, IDS[:3]), tokens(model, IDS[:90])
    for at in range(0, 1 << 20, 97):
        with load_fixed(tiny_gguf, threads=1) as model:
            assert tokens(model, IDS[:3]) == short
            call = partial(tokens, model, IDS[:90], 1)
            if not interrupted(call, at, lambda code: "backends/ggml/" in code.co_filename):
                break
            assert tokens(model, IDS[:3]) == short and tokens(model, IDS[:90]) == long
    assert at > 200


CLOSED = """
import gc, sys, stem_edge
from stem_edge.system.memory import own_memory, return_freed_memory
held = []
for _ in range(12):
    with stem_edge.load(sys.argv[1], cache_dir=sys.argv[2], threads=1) as model:
        model.generate_text(list(range(20)), max_new_tokens=4)
    gc.collect()
    return_freed_memory()
    held.append(own_memory())
print(max(held[6:]) - max(held[:6]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its memory")
def test_closing_frees_everything(tiny_gguf: Path, tmp_path: Path) -> None:
    """In a process of its own, because this one holds what other tests leave, which comes and goes."""
    command = [sys.executable, "-c", CLOSED, str(tiny_gguf), str(tmp_path)]
    grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(grown) < 1 << 19
