"""Print a table of what each quantization costs: bytes, perplexity, divergence from float32.

    python tools/experiments/quality_table.py CHECKPOINT --calibration FILE --text FILE [--only PATTERN]

Exports the checkpoint with every setting to a temporary folder, scores the text with each bundle, and
prints Markdown.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stem_edge import evaluate, export_bundle, open_bundle
from stem_edge.bundle.footprint import Footprint, footprint_of
from stem_edge.export.job.options import UNWEIGHTED

EXACT: dict[str, Any] = {"backbone": "fp32", "tables": "fp32"}
NO_TEXT: dict[str, Any] = {"calibration": None, "calibration_tokens": None}
COLUMNS = (
    "setting",
    "backbone bits a weight",
    "backbone bytes a token",
    "table bytes a record",
    "perplexity",
    "mean KL, nats",
    "99th percentile",
    "same first choice",
)


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each row of the table and the options of its export."""
    yield "int8", {"backbone": "int8"}
    for block in (32, 64, 128):
        for asymmetric in (False, True):
            for quantizer in ("rtn", "search", "gptq"):
                name = f"int4 b{block}{' asymmetric' * asymmetric} {quantizer}"
                yield name, _int4(block, asymmetric=asymmetric, quantizer=quantizer)
        yield f"int4 b{block} search without a text", _int4(block, quantizer="search", **NO_TEXT)
    for bits in ({"head": 8}, {"head": 8, "embedding": 8}, {"head": 8, "embedding": 8, "down": 8}):
        name = ", ".join(f"{kind} {count}" for kind, count in bits.items())
        for quantizer in ("rtn", "gptq"):
            yield f"int4 b32 {quantizer}, {name}", _int4(32, bits=bits, quantizer=quantizer)
    for backbone in ("fp32", "int8"):
        for tables in ("int8", "int4", "mixed"):
            name = f"{backbone}, {tables} tables"
            yield name, {"backbone": backbone, "tables": tables}
    for tables in ("int8", "int4", "mixed"):
        yield f"int4 b32 gptq, {tables} tables", _int4(32, tables=tables, quantizer="gptq")
    for types in ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"):
        yield f"gguf {types}", {"engine": "gguf", "backbone": types}
        if types not in UNWEIGHTED:
            yield f"gguf {types} without a text", {"engine": "gguf", "backbone": types} | NO_TEXT


def _int4(block: int, **options: Any) -> dict[str, Any]:
    return {"backbone": "int4", "block_size": block} | options


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    parser.add_argument("--calibration-tokens", type=int, metavar="COUNT")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="only settings whose name matches"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact"
        export_bundle(args.checkpoint, exact, **EXACT)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        print(row("fp32", exact, args.text, exact), flush=True)
        for name, options in settings():
            if not re.search(args.only, name):
                continue
            out = Path(folder) / "quantized"
            text = {"calibration": args.calibration, "calibration_tokens": args.calibration_tokens}
            if options.get("engine") != "gguf":
                options["prefill_graph"] = False
            export_bundle(args.checkpoint, out, **(EXACT | text | options), force=True)
            print(row(name, out, args.text, exact), flush=True)


def row(name: str, bundle: Path, text: Path, exact: Path) -> str:
    """Score a bundle and format its row."""
    found = evaluate(bundle, text, against=exact, worst=0)
    size = footprint_of(open_bundle(bundle).manifest)
    record = size.tables_nbytes / size.model.records if size.tables else 0
    figures = [f"{bits_of(size):.2f}", f"{size.step_nbytes:,}", f"{record:,.0f}"]
    figures.append(f"{found.perplexity:.3f}")
    if found.divergence is not None:
        figures += [f"{found.divergence.mean:.5f}", f"{found.divergence.percentile_99:.4f}"]
        figures.append(f"{found.divergence.agreement:.2%}")
    return f"| {' | '.join([name, *figures])} |"


def bits_of(size: Footprint) -> float:
    """Bits per weight of the backbone, including scales."""
    model = size.model
    stored = model.backbone_parameters
    if model.tied_head and size.engine == "onnxruntime":
        stored += model.vocab_size * model.dim  # because onnxruntime stores a tied head twice
    return 8 * size.backbone_nbytes / stored


if __name__ == "__main__":
    main()
