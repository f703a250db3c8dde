"""Load forged bundles, one after the other, and report on each: python forged_worker.py CACHE.

Reads a line of JSON for each (forged_cases.Case) and writes one. Memory is limited, so that unbounded
growth fails here; forged_cases.Forged limits the time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

MEMORY_NBYTES = 2 << 30  # address space, beyond that of the imports
PROMPT = [0, 1, 0] * 3  # so long that graphs for prompts compute it
TEXTS = ["Hello", "a b\n", "\u00e9\U0001f600" * 20]
failed: list[str] = []  # exceptions in other threads


def run(case: dict[str, Any], cache: Path, allowed: list[int]) -> None:
    """Load a bundle and use it; append to `allowed` the bytes that it may take."""
    import stem_edge

    with stem_edge.load(
        case["path"],
        context_length=16,
        slots=case["slots"],
        threads=1,
        engine=case["engine"],
        cache_dir=cache,
        progress=False,
    ) as model:
        # Add the mapped weights, because their resident pages count while memory is plentiful.
        allowed += [path.stat().st_size for path in Path(case["path"]).glob("backbone.*")]
        allowed.append(model.plan.total - model.plan.process)
        if case["texts"]:
            use_texts(model)
        for _ in model.generate(PROMPT, max_new_tokens=2):
            pass
        model.logits(PROMPT)


def use_texts(model: Any) -> None:
    """Tokenize, detokenize and render a chat; any of them may be refused."""
    from stem_edge.errors import InputError

    for text in TEXTS:
        with contextlib.suppress(InputError):
            list(model.generate(text, max_new_tokens=2))
    model.detokenize(range(model.config.vocab_size))
    model.chat_prompt([{"role": "user", "content": "Hello"}])


def answer(case: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Run a case and describe its outcome."""
    from stem_edge.errors import StemEdgeError

    failed.clear()
    before, started = memory(), time.process_time()
    allowed, refused, broken = list[int](), "", ""
    try:
        run(case, cache, allowed)
    except StemEdgeError as error:
        refused = f"{type(error).__name__}: {error}"
    except BaseException:  # must not happen, so the test fails with the traceback
        broken = traceback.format_exc()
    return {
        "refused": refused,
        "broken": broken or "".join(failed),
        "seconds": time.process_time() - started,
        "taken": memory("VmHWM") - before - sum(allowed),
    }


def memory(field: str = "VmRSS") -> int:
    """Resident bytes of this process; with VmHWM the peak since the last call without it."""
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def main() -> None:
    """Answer until the input ends."""
    cache, answers = Path(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)  # because native code may print to the standard output
    threading.excepthook = lambda args: failed.append(f"in a thread: {args.exc_value!r}")
    for name in (
        "onnxruntime",
        "stem_edge.runtime.backends.onnxruntime.loader",
        "stem_edge.runtime.backends.ggml.loader",
    ):
        importlib.import_module(name)  # before measuring, so that no case pays for imports
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        told = json.dumps(answer(json.loads(line), cache))
        os.write(answers, told.encode() + b"\n")


if __name__ == "__main__":
    main()
