"""Worker process that tries a bundle's tokenizer and measures its prefill graph.

Not a command for users: stem_edge.runtime.first_load.trial starts it with python -m, and explains
why. The name of each step goes to stdout before it, so that the parent can tell which one crashed.
The last line is DONE, and the divergence of the prefill graph if it was measured. On failure the
exit status is one of those below, and the last line of stderr gives the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from stem_edge.bundle.manifest import BACKBONES, MANIFEST, TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.prefill_check import probe_tokens, tried
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.text.probe import probe
from stem_edge.system.child import REFUSED, limit_this_process

DONE = "done"
# Exit statuses other than 1, 2 and 3, which Python and an abort on Windows use.
NO_MEMORY = 12  # more memory needed than the limit; REFUSED, too

Say = Callable[[str], None]


def try_tokenizer(bundle: Bundle, say: Say) -> None:
    """Read the tokenizer, and encode and decode some texts. Raises StemEdgeError."""
    say(TOKENIZER)
    codec = TextCodec(bundle.file(TOKENIZER), bundle.manifest.model.vocab_size)
    say(f"texts through {TOKENIZER}")
    probe(codec)


def measure_prefill(bundle: Bundle, say: Say) -> float | None:
    """Return the divergence of the prefill graph, in nats; None if there is nothing to compare.

    Also None if its matrices take more memory than a trial may: these are compared when they lie in
    files (stem_edge.runtime.backends.onnxruntime.prepared.prepacked).
    """
    if not probe_tokens(bundle.manifest) or not tried(bundle.manifest):
        return None
    from stem_edge.runtime.backends.onnxruntime.prepared.prefill_measure import prefill_divergence
    from stem_edge.runtime.backends.onnxruntime.providers.graphs import joined_graphs

    say("both graphs")
    return prefill_divergence(bundle, joined_graphs(bundle, prefill=True))


def main() -> int:
    """Run with the arguments BUNDLE ENGINE MEMORY_NBYTES CPU_SECONDS [TABLES]."""
    path, engine, memory, seconds, *tables = sys.argv[1:]
    limit_this_process(int(memory), int(seconds))
    diverges = None
    try:
        _say(MANIFEST)
        bundle = open_bundle(path, *tables)
        try_tokenizer(bundle, _say)
        if any(engine == name and one.prompts for name, one in BACKBONES.items()):
            diverges = measure_prefill(bundle, _say)
    except (StemEdgeError, MemoryError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return NO_MEMORY if isinstance(error, MemoryError) else REFUSED
    _say(DONE if diverges is None else f"{DONE} {diverges:.3g}")
    return 0


def _say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
