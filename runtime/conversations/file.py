"""A conversation as a file: its messages, with their keys and values as far as kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.runtime.backends.context import PromptKey
from stem_edge.runtime.prefixes.file import PrefixFile, Saved, UnusableError, write_prefix
from stem_edge.runtime.prefixes.folder import restore, saved_of
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.text.chat import Messages


def save_messages(
    prefixes: Prefixes, path: Path, prompt: Callable[[], list[int]], messages: Messages
) -> None:
    """Write messages. prompt: makes token ids of them. Raises InputError if writing fails."""
    ids = list[int]()
    with suppress(InputError):  # messages that no turn could have are kept all the same
        ids = prompt()
    try:
        save(prefixes, path, ids, json.dumps(messages))
    except OSError as error:
        raise InputError(
            f"{path}: cannot write ({error.strerror}); choose another place"
        ) from error


def load_messages(prefixes: Prefixes, path: Path) -> Messages:
    """Read messages; their keys and values are kept. Raises InputError for any other file."""
    try:
        text = load(prefixes, path.resolve())
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


def save(prefixes: Prefixes, path: Path, token_ids: Sequence[int], messages: str) -> None:
    """Write messages with the kept keys and values of their token ids. Raises OSError."""
    best, tokens = prefixes.borrowed(prefixes.prompt_of(token_ids))
    found, fingerprint = None, prefixes.fingerprint
    try:
        if best is not None:
            found = saved_of(best.prompt, tokens, fingerprint, best.backend)
        saved, arrays = found or (Saved(fingerprint, [], []), [])
        write_prefix(path, replace(saved, messages=messages), arrays)
    finally:
        if best is not None:
            prefixes.give_back(best)


def load(prefixes: Prefixes, path: Path) -> str:
    """Read messages, and keep the keys and values beside them if they are of use here.

    Raises UnusableError, OSError.
    """
    with PrefixFile(path) as file:
        file.check()
        saved = file.saved
        if file.own and saved.token_ids and saved.fingerprint == prefixes.fingerprint:
            prefix = prefixes.opened_for(PromptKey(saved.token_ids, {}, saved.starts))
            if prefix is not None:
                with suppress(UnusableError):
                    restore(file, len(saved.token_ids), prefix.backend)
                    prefix.position = len(saved.token_ids)
                prefixes.give_back(prefix)
    return saved.messages
