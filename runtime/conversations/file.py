"""A conversation as a file: its messages, with their keys and values as far as kept."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    """Write messages with their kept keys and values. Raises InputError if writing fails.

    prompt: makes token ids of the messages.
    """
    ids = list[int]()
    with suppress(InputError):  # messages that no turn could have are kept all the same
        ids = prompt()
    best, tokens = prefixes.borrowed(prefixes.prompt_of(ids))
    found, fingerprint = None, prefixes.fingerprint
    try:
        if best is not None:
            found = saved_of(best.prompt, tokens, fingerprint, best.backend)
        saved, arrays = found or (Saved(fingerprint, [], []), [])
        write_prefix(path, replace(saved, messages=json.dumps(messages)), arrays)
    except OSError as error:
        raise InputError(
            f"{path}: cannot write ({error.strerror}); choose another place"
        ) from error
    finally:
        if best is not None:
            prefixes.give_back(best)


def load_messages(prefixes: Prefixes, path: Path) -> Messages:
    """Read messages, and keep the keys and values beside them if they are of use here.

    Raises InputError for any other file.
    """
    try:
        with PrefixFile(path.resolve()) as file:
            file.check()
            if not (saved := file.saved).messages:
                raise UnusableError("it has no messages")
            if file.own and saved.token_ids and saved.fingerprint == prefixes.fingerprint:
                _keep(prefixes, file)
        messages: Messages = json.loads(saved.messages)
    except OSError as error:
        raise InputError(f"{path}: cannot read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(
            f"{path}: not a conversation, or damaged ({error}); "
            "give a file that save_conversation wrote"
        ) from error
    return messages


def _keep(prefixes: Prefixes, file: PrefixFile) -> None:
    """Keep the keys and values of a file for later prompts."""
    ids = file.saved.token_ids
    prefix = prefixes.opened_for(PromptKey(ids, {}, file.saved.starts))
    if prefix is not None:
        with suppress(UnusableError):
            restore(file, len(ids), prefix.backend)
            prefix.position = len(ids)
        prefixes.give_back(prefix)
