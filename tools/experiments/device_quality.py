"""Print how far a bundle's graphs for accelerators are from its checkpoint, beside the CPU's own.

    python tools/experiments/device_quality.py CHECKPOINT BUNDLE --text FILE [--providers NAME,...]

The CPU plays the device unless --providers names one. Windows of the text and columns are those of
quality_table.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from quality_table import COLUMNS, EXACT, cut, loaded, nbytes, row

import stem_edge
from stem_edge.commands.options.loading import parse_providers
from stem_edge.errors import BackendError
from stem_edge.graph.names import Variant
from stem_edge.runtime.backends.onnxruntime.device import loader as device_loader

SIZE = "4GB"  # memory of the device that the CPU plays


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("bundle", type=Path)
    add("--text", type=Path, required=True, metavar="FILE", help="text that no export has seen")
    add("--providers", default="cpu", metavar="NAME,...", help="as for stem-edge generate")
    add("--windows", type=int, default=6, help="from all over the text")
    add("--window", type=int, default=512, help="tokens of each")
    add("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        exact = stem_edge.export_bundle(args.checkpoint, Path(name) / "exact", **EXACT)
        windows = cut(exact, args.text, args.windows, args.window)
        with loaded(exact.path, args.window) as logits:
            expected = [logits(ids) for ids in windows]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    size = nbytes(stem_edge.open_bundle(args.bundle))
    for title, options in ways(args.providers):
        options |= {"context_length": args.window, "threads": args.threads, "warm_start": False}
        try:
            with stem_edge.load(args.bundle, **options) as model:
                print(row(title, size, windows, expected, model.logits), flush=True)
        except BackendError as error:
            print(f"{title}: {error}", flush=True)


def ways(providers: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each way to run, and the options of load; tell the loader the variant."""
    yield "the CPU's own graphs", {"prefill_graph": False, "kv": "fp32", "prepare": False}
    given = parse_providers(providers)
    for variant in get_args(Variant):
        device_loader.ACCELERATED = device_loader.ON_CPU = (variant,)
        size = SIZE if given == ["cpu"] else None
        yield f"{providers} {variant}", {"providers": given, "device_memory": size}


if __name__ == "__main__":
    main()
