"""The command `stem-edge eval`: perplexity of bundles, and divergence from a reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stem_edge.apps.measuring.quality.quality import Divergence, Quality, evaluate
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading
from stem_edge.text_table import table, wrapped

DESCRIPTION = """\
Measure the perplexity of bundles on a text. With --against, also compare each
with a reference: the checkpoint that it was made from, or another bundle.
Perplexity is the exp of the mean of -log P(token); compare it only between
bundles with the same tokenizer. Divergence is KL(reference || bundle) of the
next token, in nats."""

OPTIONS = ("text", "lines", "window", "against", "memory")
LOADING = ("engine", "kv", "threads", "provider", "device_memory")
EPILOG = """\
examples:
  stem-edge eval exact model small --text book.txt
  stem-edge eval model --text book.txt --against runs/0000100000 --window 256"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundles", metavar="BUNDLE", nargs="+", help=BUNDLE_HELP)
    add("--text", type=Path, required=True, metavar="FILE", help="file in UTF-8 to predict")
    add("--lines", action="store_true", help="each line is a document of its own")
    window = "tokens seen at once (default: the context, up to 2048)"
    add("--window", type=int, metavar="N", help=window)
    against = "bundle or checkpoint to compare distributions with"
    add("--against", metavar="PATH", help=against)
    add("--memory", metavar="SIZE", help="limit on memory, the reference included")
    edit = "an edit with scope everywhere; may be repeated"
    add("--edit", action="append", metavar="FILE", default=[], help=edit)
    add_loading(parser, *LOADING)
    add("--json", action="store_true", help="print a JSON list with an object for each")


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in (*OPTIONS, *LOADING)}
    found = [evaluate(bundle, edits=args.edit, **given) for bundle in args.bundles]
    print(json.dumps([asdict(each) for each in found], indent=1) if args.json else report(found))
    return 0


def report(results: Sequence[Quality]) -> str:
    lines = [*_text(results), "", *_perplexities(results)]
    compared = [(each.bundle, each.divergence) for each in results if each.divergence]
    if compared:
        lines += ["", *_divergences(compared)]
    return "\n".join(lines)


def _text(results: Sequence[Quality]) -> list[str]:
    """Return lines about the text, windows and engine of each bundle, without repeated lines."""
    lines = []
    for each in results:
        documents = "1 document" if each.documents == 1 else f"{each.documents:,} documents"
        length = f"{each.nbytes:,} bytes, {each.tokens:,} tokens predicted"
        window = f"windows of {each.window:,} tokens, one every {each.stride:,}"
        several = "s" if each.edits > 1 else ""
        edits = f"; with {each.edits} edit{several}" if each.edits else ""
        lines.append(f"{documents} of {length}; {window}; computed by {each.engine}{edits}")
    return list(dict.fromkeys(lines))


def _perplexities(results: Sequence[Quality]) -> list[str]:
    """Return a table of perplexities, compared with the reference or with the first bundle."""
    first, rows = results[0], [("", "perplexity", "change", "bits/byte")]
    base, what = first.perplexity, first.bundle
    if first.divergence:
        base, what = first.divergence.reference_perplexity, first.divergence.reference
        rows.append(("reference", f"{base:.4f}", "", ""))
    for each in results:
        same = each.ids_sha256 == first.ids_sha256
        change = f"{each.perplexity / base - 1:+.2%}" if same and each.bundle != what else ""
        rows.append((each.bundle, f"{each.perplexity:.4f}", change, f"{each.bits_per_byte:.4f}"))
    others = [each.bundle for each in results if each.ids_sha256 != first.ids_sha256]
    if not others:
        return table(rows)
    note = (
        f"{', '.join(others)}: another tokenizer than {first.bundle}, so perplexities, which are "
        "per token, cannot be compared; bits per byte can."
    )
    return [*table(rows), *wrapped(note)]


def _divergences(compared: Sequence[tuple[str, Divergence]]) -> list[str]:
    columns = ("mean", "99 %", "greatest", "same best")
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, each in compared:
        nats = (each.mean, each.percentile_99, each.greatest)
        rows.append((name, *(f"{value:.3g}" for value in nats), f"{each.agreement:.2%}"))
    first = compared[0][1]
    engine = f" on {first.reference_engine}" if first.reference_engine else ""
    return [
        f"divergence from the reference {first.reference}{engine}, nats per token",
        *table(rows),
    ]
