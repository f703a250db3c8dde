"""The command `stem-edge push`."""

from __future__ import annotations

import argparse
import json

from stem_edge.bundle.push import push
from stem_edge.commands.options.arguments import own_command
from stem_edge.commands.options.described import values_of

DESCRIPTION = """\
Push a bundle to a model hub, so that others can run it by its name. All files are hashed first. The
hub gets them in one commit, with a model card, and only those that it does not have; a push that was
cut off goes on when it is started again. A card that you wrote there stays as it is.

Log in first: hf auth login."""

EPILOG = """\
examples:
  stem-edge push model me/my-model --license apache-2.0 --base-model org/checkpoint
  stem-edge push model me/my-model --private --revision int4
  stem-edge generate hf:me/my-model "Once upon a time\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    add("name", metavar="ORG/NAME", help="name of the model on the hub, made if there is none")
    add("--private", action="store_true", help="make a new model for its owner only")
    add("--revision", metavar="BRANCH", help="branch to push to (default: the main branch)")
    add("--license", metavar="ID", help="licence for the model card, like apache-2.0")
    base = "model on the hub that it was made from, for the model card"
    add("--base-model", metavar="ORG/NAME", help=base)
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    name = push(**values_of(args, push))
    if args.json:
        print(json.dumps({"name": name}))
    else:
        print(f"{name}\ntry it: {own_command()} generate {name} 'Once upon a time'")
    return 0
