"""Forged bundles: changed files, with a manifest that lists their sizes and checksums.

Bytes are flipped, overwritten, cut and grown. JSON is changed as a tree, so that changes are meaningful.
Objects are lists of pairs, so that a name can occur twice, and Raw is text that json.dumps would not
write, such as 1e400. Hypothesis draws all of it, the same in every run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

from changing import seal
from hypothesis import strategies as st

from stem_edge.bundle.manifest import MANIFEST

Tree: TypeAlias = Any  # Pairs, list, str, int, float, bool, None or Raw


class Pairs(list[tuple[str, Tree]]):
    """A JSON object."""


class Raw(str):
    """A value written into the text as it is."""


EDGES = [0, 1, 2, 3, 15, 16, 17, 63, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20, 1 << 24]
EDGES += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64]
NUMBERS = [*EDGES, *(-number for number in EDGES), 0.5, 1e-9, 5e-324, 1e15, 1e38, 1e39, 1e308]
ODD = [Raw(text) for text in ("1e400", "NaN", "Infinity", "-0.0", "01", "9" * 5000, "", "'a'")]
WORDS = ["int4", "int8", "fp16", "fp32", "q4_0", "stem", "stem-plus", "hash-moe", "head", "BPE"]
WORDS += ["WordLevel", "Unigram", "WordPiece", "Sequence", "ByteLevel", "Replace", "NFKC", "Fuse"]
TEXTS = [
    *WORDS,
    "",
    "\0",
    "\ud800",
    "\u202e",
    "../x",
    "/etc/passwd",
    "a" * 5000,
    "(a+)+$",
    "0" * 64,
]
SHAPES: list[Tree] = [None, True, False, [], Pairs(), [[]], Pairs([("a", 1)]), list(range(300))]
SHAPES += [Raw("[" * 40 + "]" * 40), Raw('{"a":' * 5000 + "1" + "}" * 5000)]
KINDS: list[list[Tree]] = [NUMBERS, TEXTS, SHAPES, ODD]
# Copies, because a value in a tree may itself be changed later.
VALUES: st.SearchStrategy[Tree] = st.sampled_from(KINDS).flatmap(st.sampled_from).map(deepcopy)
# Templates that loop, grow, or try what the sandbox must prevent.
TEMPLATES = [
    "{{ messages }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ 'a' * 10**12 }}",
    "{{ range(10**12) | list }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9**9**9**9 }}",
    "{% include '/etc/passwd' %}",
    "{{ '%999999999d' % 1 }}",
    "{{ bos_token }}{{ messages[0]['content'] | join('x' * 99999) }}",
    "{{",
]


def sealed(bundle: Path, out: Path, files: Mapping[str, bytes]) -> Path:
    """Copy a bundle with other files; the manifest lists them unless it is one of them."""
    shutil.copytree(bundle, out)
    if MANIFEST not in files:
        return seal(out, files)
    for name, data in files.items():
        (out / name).write_bytes(data)
    return out


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, *, resized: bool = True) -> bytes:
    """Change bytes one to three times; without `resized`, their number stays the same."""
    kinds = ["flip", "fill", "noise", "swap", *(["cut", "grow"] if resized else [])]
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        length = draw(st.sampled_from([1, 4, 16, 256, 1 << 20]))
        rest = len(changed[at : at + length])
        match draw(st.sampled_from(kinds)):
            case "flip" if changed:
                changed[at] ^= 1 << draw(st.integers(0, 7))
            case "fill":  # zeros, NaN, infinity, and the largest float32
                words = [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"]
                changed[at : at + rest] = (draw(st.sampled_from(words)) * rest)[:rest]
            case "noise":
                changed[at : at + rest] = draw(st.randoms(use_true_random=False)).randbytes(rest)
            case "swap":  # a piece of the file over another
                start = draw(st.integers(0, len(changed) - rest))
                changed[at : at + rest] = changed[start : start + rest]
            case "cut":
                del changed[at:]
            case "grow":
                changed += draw(st.sampled_from([b"\0", b"\n", b"\xff" * 32, data[:4096]]))
    return bytes(changed)


@st.composite
def changed_json(draw: st.DrawFn, data: bytes) -> bytes:
    """Change the tree of a JSON text one to three times."""
    tree = json.loads(data, object_pairs_hook=Pairs)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        holder = draw(_holder(tree))
        kinds = ["value", "value", "near", "remove", "repeat", "add", "move"] if holder else ["add"]
        kind, at = draw(st.sampled_from(kinds)), draw(st.integers(0, max(0, len(holder) - 1)))
        _change(draw, tree, holder, at, kind)
    text = _text(tree)
    if draw(st.integers(0, 15)) == 0:
        text = draw(st.sampled_from(["\ufeff" + text, text + text, text[:-1], text.upper()]))
    return text.encode("utf-8", "surrogatepass")


def _change(draw: st.DrawFn, tree: Tree, holder: Tree, at: int, kind: str) -> None:
    named = isinstance(holder, Pairs)
    if kind == "remove":
        del holder[at]
    elif kind == "repeat":
        holder.append(deepcopy(holder[at]))
    elif kind == "add":
        holder.append(("added", draw(VALUES)) if named else draw(VALUES))
    else:
        old = holder[at][1] if named else holder[at]
        if kind == "value":
            new = draw(VALUES)
        elif kind == "near":
            new = draw(_near(old))
        else:  # a value from elsewhere in the tree
            other = draw(_holder(tree))
            new = draw(st.sampled_from(other)) if other else None
            # As text, because otherwise a tree could contain itself.
            new = Raw(_text(new[1] if isinstance(other, Pairs) and new is not None else new))
        holder[at] = (holder[at][0], new) if named else new


def _near(old: Tree) -> st.SearchStrategy[Tree]:
    """Values of the same type."""
    match old:
        case bool():
            return st.just(not old)
        case int() | float():
            return st.sampled_from([old + 1, old - 1, old * 2, old // 2, -old, old * 1000])
        case str():
            return st.sampled_from([*TEXTS, old + "x", old[:-1], old.upper()])
    return VALUES


@st.composite
def _holder(draw: st.DrawFn, tree: Tree) -> Tree:
    """Draw an object or array of a tree."""
    while True:
        values = [item[1] for item in tree] if isinstance(tree, Pairs) else tree
        inner = [value for value in values if isinstance(value, list)]
        if not inner or not draw(st.integers(0, 2)):
            return tree
        tree = draw(st.sampled_from(inner))


def _text(tree: Tree) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(name)}:{_text(value)}" for name, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(_text, tree)) + "]"
    return json.dumps(tree)
