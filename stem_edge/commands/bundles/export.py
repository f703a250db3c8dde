"""The command `stem-edge export`: convert a checkpoint to a bundle."""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from stem_edge.bundle.manifest import TOKENIZER_CONFIG
from stem_edge.bundle.opening import Bundle
from stem_edge.commands.bundles.bundle_report import bundle_table
from stem_edge.errors import ExportError, StemEdgeError
from stem_edge.export.exporter import export_with
from stem_edge.export.job.recipe import EXACT, FAR, LOSSLESS, NEAR, TYPES, Recipe
from stem_edge.export.job.table_plan import EXPORT_ROWS
from stem_edge.export.ngram_export import export_rows
from stem_edge.export.quantization.calibration import JUDGED_TOKENS
from stem_edge.graph.formats import ENGINES
from stem_edge.runtime.planning import memory_plan
from stem_edge.text.chat_template import has_template

VERDICTS = (
    (NEAR, "near", "its texts are about as good"),
    (FAR, "fairly near", "its texts are worse, but of the same kind"),
    (math.inf, "far from", "quality is badly degraded"),
)
DESCRIPTION = """\
Convert a trained checkpoint to a bundle, the folder that the other commands
take. CHECKPOINT comes from one of
  Hugging Face    config.json and *.safetensors: Gemma 3, 3n and 4, Llama,
                  Mistral, Qwen2, Qwen3, SmolLM, and STEM models
  GGUF            FILE.gguf of these models
  STEM trainer    a folder with params.json and consolidated.pth
  BlaGPT          state_step*.pt or best_model*.pt, or their folder
Nothing in it is executed. OUT appears only when the export is complete."""

EPILOG = """\
types:
  onnxruntime: small, balanced, near-lossless, keep, int4, int8, fp32
  ggml: the first four, f32, f16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0

examples:
  stem-edge export SmolLM2-135M smol --type near-lossless
  stem-edge export runs/0000100000 model --calibration prompt.txt
  stem-edge export SmolLM2.Q4_K_M.gguf model --engine ggml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS  # so that False and 0 count as given
    add = parser.add_argument
    checkpoint = "folder or file, hf:org/name, or hf:org/name:FILE.gguf"
    add("checkpoint", metavar="CHECKPOINT", help=checkpoint)
    add("out", metavar="OUT", help="folder of the new bundle")
    engine = "onnxruntime, or ggml (default: onnxruntime)"
    add("--engine", choices=ENGINES, metavar="NAME", help=engine)
    types = sorted({type for types in TYPES.values() for type in types})
    kind = "type of matrices, see below (default: balanced)"
    # In lower case, because llama.cpp writes Q4_K_M.
    add("--type", type=str.lower, choices=types, metavar="TYPE", help=kind)
    rows = "type of rows: int8, int4, mixed, fp16, fp32"
    add("--rows", choices=EXPORT_ROWS, metavar="TYPE", help=rows)
    calibration = "text (or ids) like those that the model will see"
    add("--calibration", metavar="FILE", help=calibration)
    add("--max-kl", type=float, metavar="NATS", help="largest divergence (default: 0.5)")
    add("--lora", metavar="DIR", help="PEFT adapter to merge into the weights")
    add("--assistant", metavar="PATH", help="draft model that was made for a Gemma 4")
    add("--tokenizer", metavar="FILE", help="tokenizer.json in place of the checkpoint's")
    prefill = "add int8 matrices for faster prompts (default: if exact, not for GGUF)"
    add("--prefill-graph", action=argparse.BooleanOptionalAction, help=prefill)
    add("-t", "--threads", type=int, metavar="N", help="threads that compute")
    add("--force", action="store_true", help="replace OUT if it is a bundle")
    only = "write the tables of n-grams alone (docs/formats.md)"
    add("--tables-only", action="store_true", help=only)


def run(args: argparse.Namespace) -> int:
    given = vars(args).copy()
    only, _, _ = given.pop("tables_only", False), given.pop("checkpoint"), given.pop("out")
    if only:
        return _run_rows(args, given)
    options = Recipe(**given)
    bundle = export_with(args.checkpoint, Path(args.out), options)
    print("\n".join(_verdict(args, bundle, options)), end="\n\n")
    print(bundle_table(bundle), end="\n\n")
    with suppress(StemEdgeError):
        if takes := memory_plan(args.out).preparing:
            print(f"the first load prepares it for this processor, once: {takes}")
    chats = has_template(bundle.file(TOKENIZER_CONFIG))
    text = f"run {args.out}" if chats else f"generate {args.out} 'Once upon a time'"
    print(f"try it: stem-edge {text}")
    return 0


def _verdict(args: argparse.Namespace, bundle: Bundle, options: Recipe) -> list[str]:
    """Describe how far the bundle diverges from its checkpoint, and how to export a nearer one."""
    report = bundle.manifest.report
    same, tokens = report.agreement or 0.0, len(report.probe_tokens)
    if not tokens:
        return ["kept as stored: nothing was calibrated or compared (stem-edge eval compares)"]
    nats = max(report.divergence, report.prefill_divergence or 0.0)
    word, means = next((word, means) for most, word, means in VERDICTS if nats <= most)
    lines = [
        f"{word} the checkpoint: {means} ({nats:g} nats, the same best token at {same:.1%} of {tokens} positions)"
    ]
    if nats > NEAR:
        nearer = EXACT[options.engine] if options.type == LOSSLESS else LOSSLESS
        again = shlex.join([str(args.checkpoint), str(args.out), "--engine", options.engine])
        lines += [f"nearer: stem-edge export {again} --type {nearer} --force"]
    if options.calibration and tokens < min(JUDGED_TOKENS, bundle.manifest.model.max_context):
        lines += [f"the calibration text has {tokens} tokens; it takes some thousands to be of use"]
    return lines


def _run_rows(args: argparse.Namespace, given: dict[str, Any]) -> int:
    if others := given.keys() - inspect.signature(export_rows).parameters:
        option = "--" + min(others).replace("_", "-")
        raise ExportError(f"{option} is for bundles, and --tables-only makes none; leave it out")
    out = export_rows(args.checkpoint, args.out, **given)
    print(f"{out}: written; gather its rows: stem_edge.open_rows({str(out)!r}).rows(ids)")
    return 0
