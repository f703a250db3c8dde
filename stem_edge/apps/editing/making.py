"""Make edits from texts, checked against their bundle."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from stem_edge.bundle.edit_files.file import MAX_TEXT, SCOPES, Edit, Replacement, Scope, tables_id
from stem_edge.bundle.edit_files.schemes import SCHEMES, Scheme
from stem_edge.bundle.manifest import TOKENIZER, TOKENIZER_CONFIG
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import BundleError, InputError
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
    subset: Sequence[int] | None = None,
    pad: str | int | None = None,
) -> Edit:
    """Make an edit: tokens of `source` look up the rows of `target` (STEM paper, 3.3).

    The text itself is not changed.

    scheme: what each token of the source looks up, for lengths n_s and n_t in tokens: "swap" (n_s =
        n_t), "pad-left" or "pad-right" (n_s >= n_t), "copy" (n_s >= n_t), "subset" (n_s <= n_t),
        "average"; see stem_edge.bundle.edit_files.schemes. Default: "auto", which is swap, copy or subset,
        depending on the lengths.
    scope: "positions": where the source occurs in a prompt, as whole words. "everywhere": at every
        token of the source, in prompt and answer, whatever text it is part of.
    layers: STEM layers that the edit applies to. Default: all.
    subset: for scheme subset, the places of the target's tokens to use, from 0 on. Default: the
        last ones.
    pad: for the padding schemes, the padding token as text or id. Default: the begin-of-text token,
        else the tokenizer's padding token, else the end-of-text token.

    Spaces around source and target are removed. Raises InputError for texts, layers or options that
    do not fit, and BundleError.
    """
    bundle = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    _check_rows(bundle)
    source, target = _text("source", source), _text("target", target)
    if scheme not in SCHEMES:
        raise InputError(f"scheme is {scheme!r}; expected one of {', '.join(SCHEMES)}")
    if scope not in SCOPES:
        raise InputError(f"scope is {scope!r}; expected one of {', '.join(SCOPES)}")
    if subset is not None and scheme != "subset":
        raise InputError(
            f"subset belongs to scheme subset, and this is {scheme}; set scheme to subset"
        )
    codec = TextCodec(bundle.file(TOKENIZER))
    change = Replacement(
        source=source,
        target=target,
        scheme=scheme,
        subset=None if subset is None else _integers("subset", subset),
        pad=_padding(bundle, codec, pad),
    )
    chosen = _layers(bundle, layers)
    edit = Edit(made_for=tables_id(bundle), change=change, layers=chosen, scope=scope)
    for text in (target, source):
        tokens_after(codec, " ", text)  # raises if the tokenizer cannot represent it
    # Applied once to the source in a text, so that what does not fit is refused here.
    overlay = Overlay(codec, bundle.manifest.model, [edit])
    overlay.of_prompt(codec.encode(f" {source}", add_special_tokens=False))
    return edit


def _check_rows(bundle: Bundle) -> None:
    """Raise InputError for a bundle without rows of tokens."""
    if bundle.manifest.tables is None:
        raise InputError(f"{bundle.path}: a dense model has no rows that could be edited")
    if bundle.manifest.model.ngram_order:
        raise InputError(
            f"{bundle.path}: the rows of this model belong to n-grams, and edits change those of "
            "tokens; give the bundle of a model with a row for each token"
        )


def _layers(bundle: Bundle, wanted: Sequence[int] | None) -> tuple[int, ...]:
    stem_layers = bundle.manifest.model.stem_layers
    chosen = stem_layers if wanted is None else tuple(sorted(set(_integers("layers", wanted))))
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


def _integers(what: str, values: Iterable[int]) -> tuple[int, ...]:
    """Convert integers of any type, numpy's too, to int. Raises InputError."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise InputError(f"{what} is {values!r}; expected integers") from None


def _padding(bundle: Bundle, codec: TextCodec, pad: str | int | None) -> int | None:
    """Return the padding token: the given one, or the default that `make_edit` describes."""
    if pad is not None:
        return one_token(bundle, codec, pad)
    # Begin-of-text is preferred because it is in all training text. A padding token often is in
    # none, so that its row may still have the values of initialization.
    if bundle.manifest.model.bos_id is not None:
        return bundle.manifest.model.bos_id
    path = bundle.file(TOKENIZER_CONFIG)
    try:
        named = json.loads(path.read_bytes()).get("pad_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path}: cannot read ({error}); export the bundle again") from error
    if isinstance(named, dict):  # an added token with its options
        named = named.get("content")
    if isinstance(named, str):
        # Not an error, because the caller cannot help a name that is not a token.
        with contextlib.suppress(InputError):
            return one_token(bundle, codec, named)
    return next(iter(bundle.manifest.model.eos_ids), None)


def one_token(bundle: Bundle, codec: TextCodec, token: str | int) -> int:
    """Return the id of a text that is a single token, or a valid id as int. Raises InputError."""
    encode = partial(codec.encode, add_special_tokens=False)
    if isinstance(token, str):
        ids = encode(token)
        if len(ids) != 1:
            others = [other for other in (f" {token.strip()}", token.strip()) if other != token]
            single = [other for other in others if len(encode(other)) == 1]
            spaced = "" if token.startswith(" ") else ", or try it with a leading space"
            cut = ", ".join(repr(codec.decode([id_], skip_special_tokens=False)) for id_ in ids)
            advice = f"did you mean {single[0]!r}?" if single else f"give one of its tokens{spaced}"
            raise InputError(
                f"{token!r} is {len(ids)} tokens, expected one: {cut or 'nothing'}; {advice}"
            )
        token = ids[0]
    try:
        number = operator.index(token)
    except TypeError:
        raise InputError(f"a token is {token!r}; expected an integer or a text") from None
    if not 0 <= number < bundle.manifest.model.vocab_size:
        last = bundle.manifest.model.vocab_size - 1
        raise InputError(f"token id {number} is out of range; this model has 0 to {last}")
    return number
