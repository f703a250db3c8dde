"""Compute what models of 1B to 70B take: bytes, reads and time.

    python tools/scale/scale.py shapes
    python tools/scale/scale.py hits IDS.int32 --other OTHER.int32
    python tools/scale/scale.py machines IDS.int32

IDS are files of little-endian int32 token ids of real text. `shapes` only computes; the others also
simulate the runtime's row cache on the ids. Prints Markdown, or JSON with --json. docs/scale.md says
what the figures mean, which are assumed, and where they are wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from scale_machines import machines
from scale_shapes import SHARES, shapes
from scale_tables import Table
from scale_text import Text, hits, read_texts

Arguments: TypeAlias = argparse.Namespace


def text_of(args: Arguments) -> Text:
    """Read the texts that the arguments name."""
    return Text(read_texts(args.ids))


COMMANDS: dict[str, tuple[Callable[..., Table], Callable[[Arguments], Table]]] = {
    "shapes": (shapes, lambda args: shapes()),
    "hits": (hits, lambda args: hits(read_texts(args.ids), read_texts(args.other))),
    "machines": (machines, lambda args: machines(text_of(args), args.share, args.context)),
}


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that a command takes."""
    parser.add_argument("--json", action="store_true", help="print JSON with exact figures")
    if command != "shapes":
        parser.add_argument("ids", type=Path, nargs="+", metavar="IDS", help="int32 token ids")
    if command == "hits":
        parser.add_argument(
            "--other", type=Path, nargs="+", required=True, metavar="IDS",
            help="text by whose counts the first rows are chosen",
        )  # fmt: skip
    if command == "machines":
        parser.add_argument("--share", choices=SHARES, default="full", help="of layers with rows")
        parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (table_of, _) in COMMANDS.items():
        said = (table_of.__doc__ or "").splitlines()[0]
        add_options(commands.add_parser(name, help=said, description=said), name)
    args = parser.parse_args()
    table = COMMANDS[args.command][1](args)
    print(json.dumps(table.records(), indent=1) if args.json else table.markdown())


if __name__ == "__main__":
    main()
