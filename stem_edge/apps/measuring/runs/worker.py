"""Worker process that loads and runs a measured model; it reads requests and answers as JSON lines.

The process imports only the engine whose memory is measured. workers.py starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pkgutil import resolve_name
from typing import Any

# Kind of subject -> class of its model.
KINDS = {
    "stem-edge": "stem_edge.apps.measuring.runs.stem:StemEdge",
    "llama.cpp": "stem_edge.apps.measuring.runs.llama:LlamaModel",
}


def carry_out(model: Any, do: str, request: dict[str, Any]) -> tuple[Any, list[float]]:
    """Load or run a model, as phase `do` says; return it, and seconds of each decode step."""
    steps = list[float]()
    match do:
        case "load":
            model = resolve_name(KINDS[request.pop("kind")])(**request.pop("options"), **request)
        case "first" | "prompt":
            model.clear()
            model.choose(request["ids"])
        case "decode":
            for token in request["ids"]:
                started = time.perf_counter()
                model.choose([token])
                steps.append(time.perf_counter() - started)
    return model, steps


def main() -> None:
    # Only answers may go to the pipe, so what libraries print to stdout goes to stderr instead.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = None
    try:
        for line in sys.stdin:
            try:
                request = json.loads(line)
                model, steps = carry_out(model, request.pop("do"), request)
                answer: dict[str, Any] = {
                    "steps": steps,
                    "counters": getattr(model, "counters", dict)(),
                }
            except Exception as error:  # any error, because the parent process must learn of it
                answer = {"error": str(error), "type": type(error).__name__}
            print(json.dumps(answer), file=out, flush=True)
    except BrokenPipeError:  # the parent was killed
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
