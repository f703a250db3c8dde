"""The option `--ray` of the commands that several machines can share."""

from __future__ import annotations

import argparse


def add_ray(group: argparse._ActionsContainer, what: str) -> None:
    """Declare the cluster that shares the work. what: how, as a help text begins."""
    text = (
        f"{what}, with Ray (pip install 'stem-edge[ray]'). ADDRESS: auto, for the cluster that ray "
        "start began here, its head's host:port, or local, to start one of this machine (default: "
        "auto). Write --ray=ADDRESS, because a word behind --ray is taken for it"
    )
    group.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help=text)
