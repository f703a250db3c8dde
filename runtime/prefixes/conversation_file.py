"""A conversation as a file: its messages, beside what is kept of their keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.runtime.prefixes.file import UnusableError
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.text.chat import Messages


def save_messages(prefixes: Prefixes, path: Path, ids: Sequence[int], messages: Messages) -> None:
    """Write messages, whose prompt has these ids. Raises InputError if that fails."""
    try:
        prefixes.save(path, ids, json.dumps(messages))
    except OSError as error:
        raise InputError(
            f"{path}: cannot write ({error.strerror}); choose another place"
        ) from error


def load_messages(prefixes: Prefixes, path: Path) -> Messages:
    """Read messages; their keys and values are kept. Raises InputError for any other file."""
    try:
        text = prefixes.load(path.resolve())
        if not text:
            raise UnusableError("it has no messages")
        messages: Messages = json.loads(text)
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(
            f"{path}: not a conversation, or damaged ({error}); "
            "give a file that save_conversation wrote"
        ) from error
    return messages
