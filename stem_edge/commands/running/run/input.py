"""Read messages and commands of `stem-edge run` from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import NamedTuple

from stem_edge.errors import InputError
from stem_edge.text.messages import MAX_MESSAGE_CHARS

QUOTES = '"""'


class Typed(NamedTuple):
    """A typed message, or a slash command such as /help."""

    text: str
    is_command: bool


class TypedLines:
    """Reads messages and commands from stdin. interactive: with a prompt and a line editor."""

    def __init__(self, interactive: bool) -> None:
        self._interactive = interactive
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # gives input() a history and its editing keys

                # Python turns this off, and then each line of a pasted text would be a message.
                readline.parse_and_bind("set enable-bracketed-paste on")
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A message that is not UTF-8 is refused later, and does not end the conversation.
            sys.stdin.reconfigure(errors="surrogateescape")

    def read(self) -> Typed | None:
        """Return the next message or command that is not empty; None at the end of the input.

        A line of three quotes begins a message of several lines. The next line of three quotes, or the
        end of the input, ends it. Raises InputError for a message that is too long.
        """
        while (line := self._line("> ")) is not None:
            if line.startswith("/"):
                return Typed(line.strip(), True)
            text = _joined(self._quoted() if line.strip() == QUOTES else iter([line]))
            if text.strip():
                return Typed(text, False)
        return None

    def _quoted(self) -> Iterator[str]:
        while (line := self._line(". ")) is not None and line.strip() != QUOTES:
            yield line

    def _line(self, prompt: str) -> str | None:
        if self._interactive:
            try:
                return input(prompt)
            except EOFError:
                print()  # what is printed next begins at the left
                return None
        line = sys.stdin.readline(MAX_MESSAGE_CHARS + 2) if sys.stdin else ""
        return line.removesuffix("\n") if line else None


def _joined(lines: Iterator[str]) -> str:
    kept, room = [], MAX_MESSAGE_CHARS  # a limit, because stdin may have no end
    for line in lines:
        kept.append(line)
        room -= len(line) + 1
        if room < -1:
            raise InputError(
                f"stdin: a message of more than {MAX_MESSAGE_CHARS:,} characters; give a shorter one"
            )
    return "\n".join(kept)
