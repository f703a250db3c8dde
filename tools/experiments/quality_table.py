"""Print a table of what each quantization costs: bytes, perplexity, divergence from float32.

    python tools/experiments/quality_table.py CHECKPOINT --text FILE [--only PATTERN] [--gguf FILE]

Exports the checkpoint with every setting to a temporary folder, scores windows of the text, each from
an empty context, and prints Markdown. With --gguf FILE, rows of llama.cpp's own quantizations follow: FILE
is the same checkpoint, written by convert_hf_to_gguf.py --outtype f32. This needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.ggml.installed import library_path
from stem_edge.numerics.distributions import divergence, log_softmax

F32: TypeAlias = npt.NDArray[np.float32]
Logits = Callable[[list[int]], F32]  # ids [T] -> logits [T, V]
WINDOWS, WINDOW = 6, 512  # number of windows, and tokens of each
EXACT: dict[str, Any] = {"type": "fp32", "rows": "fp32"}
# llama.cpp's numbers of its mixtures (llama_ftype).
THEIRS = {"Q4_0": 2, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7}
PROMPTS = ("small", "balanced", "near-lossless")  # types whose graph for prompts is measured, too
COLUMNS = (
    "weights", "MB", "perplexity", "KL, nats", "standard error", "99th percentile", "same first choice",
)  # fmt: skip


def settings(stem: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each row and the options of its export."""
    for name in ("small", "balanced", "near-lossless", "int4"):
        yield name, {"type": name}
    if stem:
        for rows in ("int8", "int4"):
            yield f"balanced, {rows} rows", {"rows": rows}
    if library_path() is not None:
        for types in ("q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0"):
            yield f"gguf {types}", {"engine": "ggml", "type": types}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("--text", type=Path, required=True, metavar="FILE", help="text that no setting has seen")
    whole = "the checkpoint as llama.cpp's converter writes it"
    add("--gguf", type=Path, metavar="FILE", help=whole)
    add("--only", default="", metavar="PATTERN", help="only rows whose name matches")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = stem_edge.export_bundle(args.checkpoint, folder / "exact", **EXACT)
        windows = cut(exact, args.text)
        print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        with loaded(folder / "exact") as logits:
            expected = [logits(ids) for ids in windows]
            print(row("fp32", nbytes(exact), windows, expected, logits), flush=True)
        stem = bool(exact.manifest.model.stem_layers)
        for title, options in settings(stem):
            if re.search(args.only, title):
                both = prompts_too(options)
                options = {"rows": "fp32"} | options
                made = stem_edge.export_bundle(
                    args.checkpoint, folder / "one", **options, force=True, prefill_graph=both
                )
                for prefill in (False, True) if made.manifest.has_prefill else (False,):
                    with loaded(folder / "one", prefill) as logits:
                        what = title + ", prompts" * prefill
                        print(row(what, nbytes(made), windows, expected, logits), flush=True)
        if args.gguf is not None:
            for title, path in theirs(args.gguf, folder / "theirs.gguf"):
                if re.search(args.only, title):
                    found = row(title, path.stat().st_size, windows, expected, by_llama(path))
                    print(found, flush=True)


def prompts_too(options: dict[str, Any]) -> bool | None:
    """Return the export option prefill_graph: True for types in PROMPTS, None for ggml."""
    return None if options.get("engine") == "ggml" else options.get("type") in PROMPTS


def cut(exact: Bundle, text: Path) -> list[list[int]]:
    """Return windows of token ids, spread evenly over a text."""
    tokenizer = Tokenizer.from_file(str(exact.file(TOKENIZER)))
    ids = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - WINDOW, WINDOWS).astype(int)
    return [ids[start : start + WINDOW] for start in starts]


def nbytes(bundle: Bundle) -> int:
    """Return the size in bytes of the backbone's weights for decoding."""
    return footprint_of(bundle.manifest).backbone_nbytes


@contextmanager
def loaded(bundle: Path, prefill: bool = False) -> Iterator[Logits]:
    """Context manager: load a bundle with a float32 KV cache; yield a function for its logits."""
    with stem_edge.load(bundle, context_length=WINDOW, kv="fp32") as model:
        model.engine.uses_prefill = prefill
        yield model.logits


def theirs(whole: Path, quantized: Path) -> Iterator[tuple[str, Path]]:
    """Quantize a GGUF file with llama.cpp; yield (name, file), one type after the other."""
    import llama_cpp

    for name, number in THEIRS.items():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = number
        status = llama_cpp.llama_model_quantize(
            str(whole).encode(), str(quantized).encode(), params
        )
        if status:
            raise RuntimeError(f"llama.cpp cannot make {name}: status {status}")
        yield f"llama.cpp {name}", quantized


def by_llama(path: Path) -> Logits:
    """Load a GGUF file in llama.cpp with a float32 KV cache; return a function for its logits."""
    import llama_cpp

    size: Any = {"n_ctx": 1024, "n_batch": 1024, "n_threads": 2, "logits_all": True}
    size |= dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    model: Any = llama_cpp.Llama(str(path), flash_attn=False, verbose=False, **size)

    def logits(ids: list[int]) -> F32:
        model.reset()
        model.eval(ids)
        return np.array(model.scores[: len(ids)], np.float32)

    return logits


def row(
    title: str, size: int, windows: list[list[int]], expected: list[F32], logits: Logits
) -> str:
    """Compare the logits of all windows with the expected ones, and format a row of the table."""
    costs, same, losses = [], [], []
    for ids, wanted in zip(windows, expected, strict=True):
        found = logits(ids)
        costs.append(divergence(wanted, found))
        same.append(wanted.argmax(-1) == found.argmax(-1))
        losses.append(-log_softmax(found)[np.arange(len(ids) - 1), ids[1:]])
    nats = np.concatenate(costs)
    figures = [
        f"{size / 1e6:.1f}",
        f"{np.exp(np.concatenate(losses).mean()):.3f}",
        f"{nats.mean():.4f}",
        f"{nats.std() / np.sqrt(len(nats)):.4f}",
        f"{np.percentile(nats, 99):.3f}",
        f"{np.concatenate(same).mean():.1%}",
    ]
    return f"| {' | '.join([title, *figures])} |"


if __name__ == "__main__":
    main()
