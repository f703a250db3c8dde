"""The command `stem-edge run`, a chat: typed input, slash commands, and printed answers."""

from stem_edge.commands.running.run.command import DESCRIPTION, EPILOG, add_arguments, run

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
