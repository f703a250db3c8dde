"""The command `stem-edge run`: what is typed (input.py), commands in it, answers as printed."""

from stem_edge.commands.running.run.command import DESCRIPTION, EPILOG, add_arguments, run

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
