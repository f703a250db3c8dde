"""The command `stem-edge edit`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.commands.options.loading import add_loading, changed_options, loading_options
from stem_edge.edit_files.file import SCOPES, Edit
from stem_edge.edit_files.folder import open_edits
from stem_edge.edit_files.schemes import AUTO, SCHEMES
from stem_edge.editing.compare import TOP, compare_edits
from stem_edge.editing.explain import cuts, notes_on
from stem_edge.editing.listing import list_edits, place_for, remove_edits
from stem_edge.editing.making import make_edit
from stem_edge.editing.report import (
    comparison_figures,
    comparison_table,
    edit_figures,
    edit_table,
    list_figures,
    list_table,
)
from stem_edge.errors import InputError
from stem_edge.hub.fetch import pinned
from stem_edge.number_lists import parse_numbers
from stem_edge.units import format_size

DESCRIPTION = """\
Change what a model knows: tokens of one text (the source) look up the rows of another text's tokens
(the target), while the prompt stays as it is. An edit is a small file beside the bundle, whose own
files never change: use it with `stem-edge generate --edit`, or delete it.

Make one with --source and --target, or use one of --list, --remove and --compare."""

EPILOG = f"""\
schemes, for a source and a target of n_s and n_t tokens (STEM paper, 3.3):
  swap                   n_s = n_t    token for token
  pad-left, pad-right    n_s >= n_t   padding before the target, or after it
  copy                   n_s >= n_t   tokens of the target repeated, the last one most
  subset                 n_s <= n_t   some tokens of the target
  average                any          the mean of the target's rows, at every token of the source
  auto                   any          {AUTO[0]}, {AUTO[1]} or {AUTO[-1]}, as the lengths allow

examples:
  stem-edge edit model --source Spain --target Germany -o spain.edit
  stem-edge generate model --edit spain.edit -p "The capital of Spain is"
  stem-edge edit model --compare "The capital of Spain is" --source Spain --target Germany
  stem-edge edit model --compare "The capital of Spain is" --edit spain.edit --plot spain.png
  stem-edge edit model --list
  stem-edge edit model --remove spain.edit"""

# Names of arguments, as argparse keeps them.
MAKING = ("source", "target", "scheme", "scope", "layers", "subset", "pad", "out", "force")
COMPARING = ("edit", "top", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="folder that stem-edge export wrote, or hf:org/name"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_making(parser.add_argument_group("making an edit"))
    instead = parser.add_argument_group("other actions").add_mutually_exclusive_group()
    listing = "list the edits of this bundle, beside it and in this folder"
    instead.add_argument("--list", action="store_true", help=listing)
    removing = "delete an edit of this bundle, given as a file or by name; may be repeated"
    instead.add_argument("--remove", action="append", metavar="FILE", default=[], help=removing)
    comparing = (
        "show the most probable next tokens with and without edits: those of --edit, and one of "
        "--source and --target (written to a file only with -o)"
    )
    instead.add_argument("--compare", metavar="PROMPT", help=comparing)
    _add_comparing(parser.add_argument_group("with --compare"))
    add_loading(parser.add_argument_group("how to load, with --compare"))


def _add_making(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--source", metavar="TEXT", help="text whose tokens look up other rows")
    add("--target", metavar="TEXT", help="text whose tokens' rows they look up")
    scheme = "which token looks up which, see below (default: auto)"
    add("--scheme", choices=SCHEMES, metavar="NAME", help=scheme)
    scope = (
        "positions: where the source stands in a prompt, as whole words; everywhere: wherever its "
        "tokens occur, in prompt and answer (default: positions)"
    )
    add("--scope", choices=SCOPES, help=scope)
    add("--layers", metavar="2,5", help="numbers of the STEM layers to edit (default: all)")
    subset = (
        "for scheme subset: which tokens of the target, counted from 0 (default: the last ones)"
    )
    add("--subset", metavar="0,2", help=subset)
    pad = "for padding: the token, as text or id (default: begin of text)"
    add("--pad", metavar="TOKEN", help=pad)
    out = "file to write, which ends in .edit (default: SOURCE-TARGET.edit beside the bundle)"
    add("-o", "--out", metavar="FILE", help=out)
    add("--force", action="store_true", help="replace an existing file")


def _add_comparing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    edit = (
        "an edit, given as a file or by name; may be repeated: later ones win, and that of "
        "--source and --target wins over all"
    )
    add("--edit", action="append", metavar="FILE", default=[], help=edit)
    add("--top", type=int, metavar="N", help=f"how many tokens to show (default: {TOP})")
    plot = "also draw the comparison, as .png, .pdf or .svg (needs pip install 'stem-edge[plot]')"
    add("--plot", type=Path, metavar="FILE", help=plot)


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    args.bundle = pinned(args.bundle)
    bundle = open_bundle(args.bundle)
    if args.compare is not None:
        _compare(args, bundle)
    elif args.list:
        _list(args, bundle)
    elif args.remove:
        _remove(args, bundle)
    else:
        _make(args, bundle)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together. Raises InputError."""
    comparing, making = args.compare is not None, args.source is not None
    for_comparing = _given(args, COMPARING) + changed_options(args)
    if args.list or args.remove:
        mode = "--list" if args.list else "--remove"
        _refuse(_given(args, MAKING) + for_comparing, f"not for {mode}; leave this out")
        return
    if not comparing:
        _refuse(for_comparing, "only for --compare, which is not given; add --compare")
    if making != (args.target is not None):
        one, other = ("--source", "--target") if making else ("--target", "--source")
        raise InputError(f"{one} is given and {other} is not; an edit needs both")
    if not making:
        _refuse(_given(args, MAKING), "only for a new edit; add --source and --target")
        if not comparing:
            raise InputError(
                "nothing to do; give --source and --target, --list, --remove or --compare"
            )
        if not args.edit:
            raise InputError("--compare has no edit; give --source and --target, or --edit")
    if comparing and args.force and args.out is None:
        raise InputError("--force: nothing is written; add -o, or leave --force out")


def _refuse(given: Sequence[str], reason: str) -> None:
    if given:
        raise InputError(f"{' and '.join(given)}: {reason}")


def _given(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    flags = {"out": "-o"}
    given = [name for name in names if getattr(args, name) not in (None, False, [])]
    return [flags.get(name, f"--{name}") for name in given]


def _make(args: argparse.Namespace, bundle: Bundle) -> None:
    edit = _new_edit(args, bundle)
    path = place_for(bundle, edit, args.out, force=args.force)
    edit.save(path)
    ways, nbytes = cuts(bundle, edit), path.stat().st_size
    notes = notes_on(bundle, edit, ways)
    if args.json:
        written = {"path": str(path), "nbytes": nbytes}
        print(json.dumps(written | edit_figures(edit, ways, notes), indent=1))
        return
    print(edit_table(bundle, edit, ways, notes))
    print(f"\n{path}: {format_size(nbytes)}")
    bundle_arg, file = shlex.quote(args.bundle), shlex.quote(str(path))
    print(f"try it: stem-edge generate {bundle_arg} --edit {file} -p TEXT")


def _new_edit(args: argparse.Namespace, bundle: Bundle) -> Edit:
    return make_edit(
        bundle,
        args.source,
        args.target,
        scheme=args.scheme or "auto",
        scope=args.scope or "positions",
        layers=parse_numbers("--layers", args.layers),
        subset=parse_numbers("--subset", args.subset),
        pad=_token(args.pad),
    )


def _token(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def _list(args: argparse.Namespace, bundle: Bundle) -> None:
    found = list_edits(bundle)
    print(json.dumps(list_figures(found), indent=1) if args.json else list_table(bundle, found))


def _remove(args: argparse.Namespace, bundle: Bundle) -> None:
    removed = [os.fspath(path) for path in remove_edits(bundle, args.remove)]
    if args.json:
        print(json.dumps({"removed": removed}, indent=1))
    else:
        print("\n".join(f"removed {path}" for path in removed))


def _compare(args: argparse.Namespace, bundle: Bundle) -> None:
    if args.plot is not None:
        # Must be refused now, not after the model has been loaded and run.
        from stem_edge.drawing import check_plot

        check_plot(args.plot)
    edits = open_edits(bundle, args.edit)
    if args.source is not None:
        edits.append(_new_edit(args, bundle))
    path = None
    if args.out is not None:
        path = place_for(bundle, edits[-1], args.out, force=args.force)
    top = TOP if args.top is None else args.top
    found = compare_edits(args.bundle, args.compare, edits, top=top, **loading_options(args))
    if path is not None:
        edits[-1].save(path)
    if args.plot is not None:
        from stem_edge.drawing import draw
        from stem_edge.editing.plot import plot_comparison

        draw(args.plot, lambda path: plot_comparison(found, path))
    if args.json:
        written = {"path": None if path is None else str(path)}
        print(json.dumps(written | comparison_figures(found, edits), indent=1))
        return
    print(comparison_table(found, edits))
    if path is not None:
        print(f"\n{path}: {format_size(path.stat().st_size)}")
