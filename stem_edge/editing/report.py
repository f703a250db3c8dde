"""Edits, lists of them and comparisons as text for a small terminal, and as JSON."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from stem_edge.bundle import Bundle
from stem_edge.edit_file import Edit, NewRows
from stem_edge.edit_schemes import Scheme
from stem_edge.editing.compare import Comparison, NextToken
from stem_edge.editing.explain import Cut, Token
from stem_edge.editing.listing import Listing

WIDTH = 80  # columns
COLUMN, GAP = 25, 2  # of a comparison, three side by side
LONGEST_TOKEN = 16  # columns
LONGEST_ROW = 40  # columns of a token that is looked up
MOST_TOKENS = 12  # lines of tokens that are shown of one cut
WHERE = {
    "positions": "where the source is in a prompt, its tokens",
    "everywhere": "wherever tokens of the source come, in prompt and answer, they",
}
FRONT = {
    " ": "behind a space",
    "": "where a text begins with it",
    "\n": "where a line begins with it",
}
WORDS: dict[Scheme, str] = {
    "swap": "token for token",
    "pad-left": "padding, then the target",
    "pad-right": "the target, then padding",
    "copy": "tokens of the target repeated",
    "subset": "some tokens of the target, and not the others",
    "average": "the mean of the target's rows",
}


def shown(token: Token | NextToken, width: int = LONGEST_TOKEN) -> str:
    """A token's text in quotes, cut where it is long; its id, where it is no text of its own."""
    if token.text is None:
        return f"token {token.token_id}"
    text = repr(token.text)
    return text if columns(text) <= width else _cut(text, width - 4) + "...'"


def columns(text: str) -> int:
    """How wide a terminal shows a text."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def _escaped(text: str) -> str:
    """A text without line ends and other characters that would break a table or a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cut(text: str, width: int) -> str:
    while columns(text) > width:
        text = text[:-1]
    return text


def _fill(text: str, width: int) -> str:
    return text + " " * max(0, width - columns(text))


def describe(edit: Edit) -> str:
    """An edit in some words."""
    change = edit.change
    if isinstance(change, NewRows):
        count = len(change.rows)
        return f"new rows of {count:,} token{'s' if count > 1 else ''}"
    return f"{_escaped(change.source)} -> {_escaped(change.target)}"


def scheme_of(edit: Edit) -> str:
    """Its scheme as it was chosen; new rows have none."""
    return "-" if isinstance(edit.change, NewRows) else edit.change.scheme


def layers_of(bundle: Bundle, layers: Sequence[int]) -> str:
    """Layers with commas, or that they are all."""
    every = tuple(layers) == tuple(bundle.manifest.model.stem_layers)
    return "all" if every else ",".join(map(str, layers))


def edit_table(bundle: Bundle, edit: Edit, ways: Sequence[Cut], notes: Sequence[str]) -> str:
    """What an edit does, in words and token by token."""
    layers = ", ".join(map(str, edit.layers))
    every = " (all)" if layers_of(bundle, edit.layers) == "all" else ""
    lines = _wrapped(
        f"{describe(edit)}: {WHERE[edit.scope]} look up rows of the target, in STEM layers "
        f"{layers}{every}."
    )
    for cut in ways:
        lines += ["", *_cut_lines(cut)]
    for note in notes:
        lines += ["", *_wrapped(f"note: {note}")]
    return "\n".join(lines)


def everywhere_note(edit: Edit, ways: Sequence[Cut]) -> list[str]:
    """What to know of an edit everywhere whose source is several tokens; else nothing."""
    tokens = [token for cut in ways for token in cut.source]
    if edit.scope != "everywhere" or max((len(cut.source) for cut in ways), default=0) < 2:
        return []
    names = ", ".join(dict.fromkeys(map(shown, tokens)))
    note = (
        "the source is several tokens, and each of them is changed wherever it comes, in other "
        f"words and names, too: {names}. Scope positions changes them only where they stand "
        "together in a prompt."
    )
    return [note]


def _cut_lines(cut: Cut) -> Iterator[str]:
    front = FRONT[cut.before]
    lengths = f"{_count(len(cut.source))} for {len(cut.target)} of the target"
    if cut.problem is not None:
        yield from _wrapped(f"{front}: no fit, and such prompts are refused: {cut.problem}")
        return
    yield from _wrapped(f"{front}: {lengths}, scheme {cut.scheme}, {WORDS[cut.scheme]}")
    if len(set(cut.looks_up)) == 1 and len(cut.source) > 1:
        yield from _token_lines(", ".join(map(shown, cut.source)), cut.looks_up[0])
        return
    for token, looked in list(zip(cut.source, cut.looks_up, strict=True))[:MOST_TOKENS]:
        yield from _token_lines(shown(token), looked)
    if len(cut.source) > MOST_TOKENS:
        yield f"  ... and {len(cut.source) - MOST_TOKENS} more"


def _token_lines(source: str, looked: Sequence[Token]) -> list[str]:
    rows = ", ".join(shown(token, LONGEST_ROW) for token in looked)
    rows = f"the mean of {rows}" if len(looked) > 1 else rows
    line = f"  {_fill(source, LONGEST_TOKEN)}  ->  {rows}"
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 4, drop_whitespace=True) or [line]


def _count(tokens: int) -> str:
    return f"{tokens} token{'s' if tokens > 1 else ''}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def edit_figures(edit: Edit, ways: Sequence[Cut], notes: Sequence[str]) -> dict[str, object]:
    """The same as plain JSON values."""
    return _edit_values(edit) | {"cuts": [asdict(cut) for cut in ways], "notes": list(notes)}


def _edit_values(edit: Edit) -> dict[str, object]:
    change = edit.change
    values: dict[str, object] = {"layers": list(edit.layers), "scope": edit.scope}
    if isinstance(change, NewRows):
        return {"change": "rows", "tokens": sorted(change.rows)} | values
    texts = {"source": change.source, "target": change.target, "scheme": change.scheme}
    return {"change": "replacement"} | texts | values


def list_table(bundle: Bundle, found: Listing) -> str:
    """Edit files, a line each."""
    lines = []
    if found.edits:
        lines.append(f"{'file':<24}{'change':<22}{'scheme':<10}{'scope':<11}{'layers':<8}bytes")
    for each in found.edits:
        change = _fill(_shortened(describe(each.edit), 21), 22)
        layers = _shortened(layers_of(bundle, each.edit.layers), 7)
        rest = f"{scheme_of(each.edit):<10}{each.edit.scope:<11}{layers:<8}{each.nbytes}"
        # A name is for copying, so it is never cut.
        name = _escaped(str(each.path))
        long = columns(name) > 23
        lines += [name] if long else []
        lines.append(_fill("" if long else name, 24) + change + rest)
    if not found.edits:
        where = " or ".join(str(folder.resolve()) for folder in found.folders)
        lines += _wrapped(f"no edits of this bundle in {where}")
    if found.of_other_bundles:
        lines.append(f"{found.of_other_bundles} of other bundles")
    for path, problem in found.damaged:
        lines += _wrapped(f"damaged: {_escaped(str(path))}: {problem}")
    return "\n".join(lines)


def _shortened(text: str, width: int) -> str:
    return text if columns(text) <= width else _cut(text, width - 2) + ".."


def list_figures(found: Listing) -> dict[str, object]:
    """The same as plain JSON values."""
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
    """The most probable next tokens side by side, and divergences."""
    panels = [("original", found.original)]
    panels += [("target prompt", found.target)] if found.target else []
    panels += [("edited", found.edited)]
    lines = [f"{found.bundle} on {found.engine}"]
    lines += [line for edit in edits for line in _wrapped(f"edit: {_edit_words(edit)}")]
    lines += ["", _row([name for name, _ in panels])]
    lines += [_row([tail(outcome.prompt, COLUMN) for _, outcome in panels])]
    for tokens in zip(*(outcome.top for _, outcome in panels), strict=True):
        lines.append(_row([_token_cell(token) for token in tokens]))
    lines.append(_row([head(each.text, COLUMN) for _, each in panels]))
    return "\n".join([*lines, "", *_divergence_lines(found)])


def _edit_words(edit: Edit) -> str:
    layers = ",".join(map(str, edit.layers))
    scheme = "" if isinstance(edit.change, NewRows) else f"scheme {scheme_of(edit)}, "
    return f"{describe(edit)} ({scheme}scope {edit.scope}, layers {layers})"


def tail(text: str, width: int) -> str:
    """The end of a text, which is what matters most for what comes next."""
    plain = _escaped(text)
    if columns(plain) <= width:
        return plain
    while columns(plain) > width - 3:
        plain = plain[1:]
    return "..." + plain


def head(text: str, width: int) -> str:
    """The beginning of a text that goes on from a prompt."""
    return _cut(f"...{_escaped(text)}", width)


def _row(cells: Sequence[str]) -> str:
    return (" " * GAP).join(_fill(cell, COLUMN) for cell in cells).rstrip()


def _token_cell(token: NextToken) -> str:
    return _fill(shown(token), COLUMN - 8) + f"{token.probability:>8.2%}"


def _divergence_lines(found: Comparison) -> Iterator[str]:
    values = {
        "KL(target prompt || edited)": found.edited_from_target,
        "KL(target prompt || original)": found.original_from_target,
        "KL(original || edited)": found.edited_from_original,
    }
    for name, nats in values.items():
        if nats is not None:
            yield f"{name:<31}{nats:>10.3g} nats"
    if found.target is None:
        yield "no source is in this text, so that there is no target prompt"


def comparison_figures(found: Comparison, edits: Sequence[Edit]) -> dict[str, object]:
    """The same as plain JSON values."""
    return asdict(found) | {"edits": [_edit_values(edit) for edit in edits]}
