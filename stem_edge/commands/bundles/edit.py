"""The command `stem-edge edit`: replace the table rows that tokens of a text look up."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from stem_edge.apps.editing.making import make_edit
from stem_edge.apps.editing.shown import show_edit
from stem_edge.bundle.edit_files.file import SCOPES, SUFFIX, open_edit
from stem_edge.bundle.edit_files.schemes import AUTO, SCHEMES
from stem_edge.bundle.hub.fetch import pinned
from stem_edge.bundle.opening import Bundle
from stem_edge.commands.options.loading import BUNDLE_HELP
from stem_edge.errors import InputError
from stem_edge.runtime.loading import open_or_make

DESCRIPTION = """\
Edit knowledge: tokens of one text (the source) use the table rows of another
text's tokens (the target), while the prompt stays as it is. An edit is a small
file; the bundle never changes."""

EPILOG = f"""\
schemes, for a source and a target of n_s and n_t tokens (STEM paper, 3.3):
  swap                   n_s = n_t    token for token
  pad-left, pad-right    n_s >= n_t   padding before the target, or after it
  copy                   n_s >= n_t   tokens of the target repeated
  subset                 n_s <= n_t   the last tokens of the target
  average                any          the mean of the target's rows
  auto                   any          {AUTO[0]}, {AUTO[1]} or {AUTO[-1]}, as the lengths allow

examples:
  stem-edge edit model --source Spain --target Germany -o spain.edit
  stem-edge generate model --edit spain.edit "Spain lies in" """

MAKING = ("source", "target", "scheme", "scope", "layers", "out", "force")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add = parser.add_argument
    add("--show", metavar="FILE", help="show an edit, and which rows each token uses")
    add("--source", metavar="TEXT", help="text whose tokens will use other rows")
    add("--target", metavar="TEXT", help="text whose rows they will use")
    scheme = "which token uses which rows, see below (default: auto)"
    add("--scheme", choices=SCHEMES, metavar="NAME", help=scheme)
    scope = "positions: where the source stands; or everywhere"
    add("--scope", choices=SCOPES, metavar="NAME", help=scope)
    add("--layers", metavar="2,5", help="numbers of the STEM layers to edit (default: all)")
    add("-o", "--out", metavar="FILE", help="file to write, which ends in .edit")
    add("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    bundle = open_or_make(pinned(args.bundle))
    if args.show is not None:
        print("\n".join(show_edit(bundle, open_edit(bundle, args.show))))
        return 0
    how: dict[str, Any] = {"scheme": args.scheme or "auto", "scope": args.scope or "positions"}
    edit = make_edit(bundle, args.source, args.target, layers=_layers(args.layers), **how)
    path = Path(args.out)
    _check_place(bundle, path, args.force)
    edit.save(path)
    print("\n".join(show_edit(bundle, edit)))
    command = shlex.join(["generate", str(args.bundle), "--edit", str(path)])
    print(f"{path}: written; try it: stem-edge {command} -p TEXT")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    making = ["--" + name for name in MAKING if getattr(args, name) not in (None, False)]
    if args.show is not None and making:
        raise InputError(f"{making[0]}: for a new edit, not for --show; leave one of them out")
    missing = [f"--{name}" for name in ("source", "target", "out") if getattr(args, name) is None]
    if args.show is None and missing:
        raise InputError(
            f"{', '.join(missing)}: missing; a new edit needs --source, --target and -o FILE, and "
            "--show FILE describes one"
        )


def _check_place(bundle: Bundle, path: Path, force: bool) -> None:
    """Raise InputError if `path` has a wrong suffix, is in the bundle, or exists without `force`."""
    if path.suffix != SUFFIX:
        raise InputError(f"{path}: the name of an edit file ends in {SUFFIX}; add it")
    if path.parent.resolve().is_relative_to(bundle.path.resolve()):
        raise InputError(
            f"{path}: inside the bundle, which is never changed; choose a path outside of it"
        )
    if not force and (path.exists() or path.is_symlink()):
        raise InputError(f"{path}: exists; choose another name with -o, or add --force")


def _layers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--layers {text!r}: not numbers separated by commas, like 2,5") from None
