"""Make an edit from two texts, and check that it fits the bundle."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

from stem_edge.bundle.edit_files.file import MAX_TEXT, SCOPES, Edit, Scope, tables_id
from stem_edge.bundle.edit_files.schemes import Scheme
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.overlay import Overlay
from stem_edge.runtime.lookups.spans import tokens_after
from stem_edge.runtime.text.codec import TextCodec


def make_edit(
    bundle: str | Path | Bundle,
    source: str,
    target: str,
    *,
    scheme: Scheme = "auto",
    scope: Scope = "positions",
    layers: Sequence[int] | None = None,
) -> Edit:
    """Make an edit: tokens of `source` look up the table rows of `target` (STEM paper, 3.3).

    The text of a prompt is not changed.

    scheme: which rows of the target each token of the source looks up. With n_s tokens in the source and
        n_t in the target: "swap" (n_s = n_t), "pad-left" or "pad-right" (n_s >= n_t), "copy" (n_s >= n_t),
        "subset" (n_s <= n_t), "average" (any); docs/edit.md explains them. Default: "auto",
        which is swap, copy or subset, depending on n_s and n_t.
    scope: "positions": where the source occurs in a prompt, as whole words. "everywhere": at every
        token of the source, in prompt and answer, whatever text it is part of.
    layers: STEM layers that the edit applies to. Default: all.

    The padding schemes pad with the begin-of-text token, or with the end-of-text token if the model has
    no begin-of-text token. Spaces around source and target are removed. Raises InputError for texts,
    layers or options that do not fit, and BundleError.
    """
    bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    _check_rows(bundle)
    source, target = _text("source", source), _text("target", target)
    if scope not in SCOPES:
        raise InputError(f"scope is {scope!r}; expected one of {', '.join(SCOPES)}")
    codec, model = TextCodec(bundle.file(TOKENIZER)), bundle.manifest.model
    pad = next(iter(model.eos_ids), None) if model.bos_id is None else model.bos_id
    edit = Edit(
        made_for=tables_id(bundle),
        source=source,
        target=target,
        scheme=scheme,
        pad=pad,
        layers=_layers(bundle, layers),
        scope=scope,
    )
    for text in (target, source):
        tokens_after(codec, " ", text)  # raises if the tokenizer cannot represent it
    # Apply the edit to a text with the source: raises if source and target do not fit.
    overlay = Overlay(codec, model, [edit])
    overlay.of_prompt(codec.encode(f" {source}", add_special_tokens=False))
    return edit


def _check_rows(bundle: Bundle) -> None:
    """Raise InputError if the bundle has no tables, or tables of n-grams."""
    if bundle.manifest.tables is None:
        raise InputError(f"{bundle.path}: a dense model has no rows that could be edited")
    if bundle.manifest.model.ngram_order:
        raise InputError(
            f"{bundle.path}: the rows of this model belong to n-grams, and edits change those of "
            "tokens; give the bundle of a model with a row for each token"
        )


def _layers(bundle: Bundle, wanted: Sequence[int] | None) -> tuple[int, ...]:
    stem_layers = bundle.manifest.model.stem_layers
    try:
        chosen = tuple(
            sorted({operator.index(one) for one in (stem_layers if wanted is None else wanted)})
        )
    except TypeError:
        raise InputError(f"layers is {wanted!r}; expected integers") from None
    if not chosen or not set(chosen) <= set(stem_layers):
        raise InputError(
            f"layers are {','.join(map(str, chosen)) or 'none'}; expected STEM layers of "
            f"{','.join(map(str, stem_layers))}"
        )
    return chosen


def _text(what: str, text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"the {what} is {text!r}; give a text like Spain")
    if len(text.strip()) > MAX_TEXT:
        raise InputError(f"the {what} has {len(text)} characters; expected up to {MAX_TEXT}")
    return text.strip()
