"""Loads forged bundles, one after the other, and says what came of each: python forged_worker.py CACHE.

A line of JSON comes in for each (forged_cases.Case), and one goes out. Memory is bounded, so that
whatever grows without bound fails here; forged_cases.Forged bounds the time.
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

MEMORY_NBYTES = 2 << 30  # of addresses, beyond those of what is imported
PROMPT = [0, 1, 0]
TEXTS = ["Hello", "a b\n", "\u00e9\U0001f600" * 20]
failed: list[str] = []  # of other threads


def run(case: dict[str, Any], cache: Path, allowed: list[int]) -> None:
    """Load a bundle and use it; adds the bytes that its plan allows beside what was taken."""
    import stem_edge

    with stem_edge.load(
        case["path"],
        context_length=16,
        slots=case["slots"],
        threads=1,
        engine=case["engine"],
        prefill_graph=case["prefill"],
        trial=case["trial"],
        cache_dir=cache,
        progress=False,
    ) as model:
        # Weights are mapped, too, and their pages count where no system needs them.
        allowed += [path.stat().st_size for path in Path(case["path"]).glob("backbone.*")]
        allowed.append(model.plan.total - model.plan.process)
        if case["texts"]:
            use_texts(model)
        for _ in model.generate(PROMPT, max_new_tokens=2):
            pass
        model.logits(PROMPT)


def use_texts(model: Any) -> None:
    """Tokens of texts, and a conversation, each of which may be refused."""
    from stem_edge import InputError

    for text in TEXTS:
        with contextlib.suppress(InputError):
            list(model.generate(text, max_new_tokens=2))
    model.detokenize(range(model.config.vocab_size))
    model.chat_prompt([{"role": "user", "content": "Hello"}])


def answer(case: dict[str, Any], cache: Path) -> dict[str, Any]:
    """What came of a case."""
    from stem_edge.errors import StemEdgeError

    failed.clear()
    before, started = memory(), time.process_time()
    allowed, refused, broken = list[int](), "", ""
    try:
        run(case, cache, allowed)
    except StemEdgeError as error:
        refused = f"{type(error).__name__}: {error}"
    except BaseException:  # what must not happen, and is told
        broken = traceback.format_exc()
    return {
        "refused": refused,
        "broken": broken or "".join(failed),
        "seconds": time.process_time() - started,
        "taken": memory("VmHWM") - before - sum(allowed),
    }


def memory(field: str = "VmRSS") -> int:
    """Bytes of this process now; VmHWM: at most, since the last call without it."""
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def main() -> None:
    """Answer until there is nothing more to read."""
    cache, answers = Path(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)  # native code may print
    threading.excepthook = lambda args: failed.append(f"in a thread: {args.exc_value!r}")
    for name in (
        "onnxruntime",
        "stem_edge.runtime.backends.onnxruntime.loader",
        "stem_edge.runtime.backends.ggml.loader",
    ):
        importlib.import_module(name)  # what is not a case's memory
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        told = json.dumps(answer(json.loads(line), cache))
        os.write(answers, told.encode() + b"\n")


if __name__ == "__main__":
    main()
