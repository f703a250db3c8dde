"""Format edits, lists of them and comparisons as text for 80 columns, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from stem_edge.bundle.opening import Bundle
from stem_edge.edit_files.file import Edit, NewRows
from stem_edge.edit_files.schemes import Scheme
from stem_edge.editing.compare import Comparison, NextToken
from stem_edge.editing.explain import LONGEST_TOKEN, Cut, Token
from stem_edge.editing.listing import Listing
from stem_edge.shown import printable
from stem_edge.text_table import columns, cut, fill, quoted, table, wrapped
from stem_edge.units import format_size

COLUMN = 25  # width of each of the three columns of a comparison
LONGEST_ROW = 40  # width of a token that is looked up
MOST_TOKENS = 12  # lines for the tokens of a cut
WHERE = {
    "positions": "where the source occurs in a prompt, its tokens",
    "everywhere": "wherever tokens of the source occur, in prompt and answer, they",
}
FRONT = {
    " ": "after a space",
    "": "at the beginning of a text",
    "\n": "at the beginning of a line",
}
WORDS: dict[Scheme, str] = {
    "swap": "token for token",
    "pad-left": "padding, then the target",
    "pad-right": "the target, then padding",
    "copy": "tokens of the target repeated",
    "subset": "some tokens of the target, without the others",
    "average": "the mean of the target's rows",
}


def shown(token: Token | NextToken, width: int = LONGEST_TOKEN) -> str:
    """Return a token's text in quotes, cut to `width`; its id if it has no text."""
    return quoted(token.text, token.token_id, width)


def describe(edit: Edit) -> str:
    """Describe an edit in a few words."""
    change = edit.change
    if isinstance(change, NewRows):
        count = len(change.rows)
        return f"new rows of {count:,} token{'s' if count > 1 else ''}"
    return f"{printable(change.source)} -> {printable(change.target)}"


def scheme_of(edit: Edit) -> str:
    """Return the scheme of an edit as it was given; "-" for new rows."""
    return "-" if isinstance(edit.change, NewRows) else edit.change.scheme


def layers_of(bundle: Bundle, layers: Sequence[int]) -> str:
    """Return the layers, comma-separated, or "all"."""
    every = tuple(layers) == tuple(bundle.manifest.model.stem_layers)
    return "all" if every else ",".join(map(str, layers))


def edit_table(bundle: Bundle, edit: Edit, ways: Sequence[Cut], notes: Sequence[str]) -> str:
    """Format what an edit does, in words and token by token."""
    layers = ", ".join(map(str, edit.layers))
    every = " (all)" if layers_of(bundle, edit.layers) == "all" else ""
    lines = wrapped(
        f"{describe(edit)}: {WHERE[edit.scope]} look up rows of the target, in STEM layers "
        f"{layers}{every}."
    )
    for way in ways:
        lines += ["", *_cut_lines(way)]
    for note in notes:
        lines += ["", *wrapped(f"note: {note}")]
    return "\n".join(lines)


def _cut_lines(way: Cut) -> Iterator[str]:
    front = FRONT[way.before]
    count = len(way.source)
    lengths = f"{count} token{'s' if count > 1 else ''} for {len(way.target)} of the target"
    if way.problem is not None:
        yield from wrapped(f"{front}: no fit, so such prompts are refused: {way.problem}")
        return
    yield from wrapped(f"{front}: {lengths}, scheme {way.scheme}, {WORDS[way.scheme]}")
    if len(set(way.looks_up)) == 1 and len(way.source) > 1:
        yield from _token_lines(", ".join(map(shown, way.source)), way.looks_up[0])
        return
    for token, looked in list(zip(way.source, way.looks_up, strict=True))[:MOST_TOKENS]:
        yield from _token_lines(shown(token), looked)
    if len(way.source) > MOST_TOKENS:
        yield f"  ... and {len(way.source) - MOST_TOKENS} more"


def _token_lines(source: str, looked: Sequence[Token]) -> list[str]:
    rows = ", ".join(shown(token, LONGEST_ROW) for token in looked)
    rows = f"the mean of {rows}" if len(looked) > 1 else rows
    return wrapped(f"  {fill(source, LONGEST_TOKEN)}  ->  {rows}", "    ")


def edit_figures(edit: Edit, ways: Sequence[Cut], notes: Sequence[str]) -> dict[str, object]:
    """Return what an edit does as plain JSON values."""
    return _edit_values(edit) | {"cuts": [asdict(way) for way in ways], "notes": list(notes)}


def _edit_values(edit: Edit) -> dict[str, object]:
    change = edit.change
    values: dict[str, object] = {"layers": list(edit.layers), "scope": edit.scope}
    if isinstance(change, NewRows):
        return {"change": "rows", "tokens": sorted(change.rows)} | values
    texts = {"source": change.source, "target": change.target, "scheme": change.scheme}
    return {"change": "replacement"} | texts | values


def list_table(bundle: Bundle, found: Listing) -> str:
    """Format edit files, a line each; names come last and whole, so that they can be copied."""
    rows = [("change", "scheme", "scope", "layers", "size", "file")]
    for each in found.edits:
        edit = each.edit
        layers = cut(layers_of(bundle, edit.layers), 7, "..")
        words = (cut(describe(edit), 21, ".."), scheme_of(edit), edit.scope, layers)
        rows.append((*words, format_size(each.nbytes), printable(str(each.path))))
    where = " or ".join(str(folder.resolve()) for folder in found.folders)
    nothing = wrapped(f"no edits of this bundle in {where}")
    lines = table(rows, "l") if found.edits else nothing
    if found.of_other_bundles:
        lines.append(f"{found.of_other_bundles} of other bundles")
    for path, problem in found.damaged:
        lines += wrapped(f"damaged: {printable(str(path))}: {problem}")
    return "\n".join(lines)


def list_figures(found: Listing) -> dict[str, object]:
    """Return a list of edit files as plain JSON values."""
    return {
        "folders": [str(folder.resolve()) for folder in found.folders],
        "edits": [
            {"path": str(each.path), "nbytes": each.nbytes} | _edit_values(each.edit)
            for each in found.edits
        ],
        "of_other_bundles": found.of_other_bundles,
        "damaged": [{"path": str(path), "problem": problem} for path, problem in found.damaged],
    }


def comparison_table(found: Comparison, edits: Sequence[Edit]) -> str:
    """Format the most probable next tokens side by side, and the divergences."""
    sides = [
        [
            name,
            tail(each.prompt, COLUMN),
            *(f"{fill(shown(t), COLUMN - 8)}{t.probability:>8.2%}" for t in each.top),
            head(each.text, COLUMN),
        ]
        for name, each in found.outcomes().items()
    ]
    lines = [f"{found.bundle} on {found.engine}"]
    lines += [line for edit in edits for line in wrapped(f"edit: {_edit_words(edit)}")]
    lines += ["", *table(list(zip(*sides, strict=True)), "l")]
    return "\n".join([*lines, "", *_divergence_lines(found)])


def _edit_words(edit: Edit) -> str:
    layers = ",".join(map(str, edit.layers))
    scheme = "" if isinstance(edit.change, NewRows) else f"scheme {scheme_of(edit)}, "
    return f"{describe(edit)} ({scheme}scope {edit.scope}, layers {layers})"


def tail(text: str, width: int) -> str:
    """Return the end of a text, because that matters most for the next token."""
    plain = printable(text)
    if columns(plain) <= width:
        return plain
    while columns(plain) > width - 3:
        plain = plain[1:]
    return "..." + plain


def head(text: str, width: int) -> str:
    """Return the beginning of a continuation."""
    return cut(f"...{printable(text)}", width)


def _divergence_lines(found: Comparison) -> Iterator[str]:
    values = {
        "KL(target prompt || edited)": found.edited_from_target,
        "KL(target prompt || original)": found.original_from_target,
        "KL(original || edited)": found.edited_from_original,
    }
    known = {name: nats for name, nats in values.items() if nats is not None}
    yield from table([(name, f"{nats:.3g}", "nats") for name, nats in known.items()], "lrl")
    if found.target is None:
        yield "no source occurs in this text, so there is no target prompt"


def comparison_figures(found: Comparison, edits: Sequence[Edit]) -> dict[str, object]:
    """Return a comparison as plain JSON values."""
    return asdict(found) | {"edits": [_edit_values(edit) for edit in edits]}
