"""Conversation files: messages as JSON, readable only by the user who saved them."""

from __future__ import annotations

import json
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.files.disk import read_file, write_whole
from stem_edge.runtime.text.chat import Messages

MOST_NBYTES = 8 << 20


def save_messages(path: Path, messages: Messages) -> None:
    try:
        data = json.dumps({"messages": messages}, indent=1).encode()
        write_whole(path, data, durable=True, mode=0o600)
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot write ({reason}); choose another place") from error


def load_messages(path: Path) -> Messages:
    try:
        data = read_file(path.resolve(), MOST_NBYTES)
        messages: Messages = json.loads(data)["messages"]
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror}); give another file") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not a saved conversation; give another file") from error
    return messages
