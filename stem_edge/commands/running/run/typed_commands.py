"""Slash commands of `stem-edge run`, such as /help and /retry."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stem_edge.commands.running.run.session import Session
from stem_edge.errors import InputError
from stem_edge.runtime.sampling_params import RANGES
from stem_edge.sampling import FILTERS
from stem_edge.shown import printable, shown
from stem_edge.text_table import cut, fill, shown_lines

EXIT = "/exit"
ENDS = (EXIT, "/quit", "/bye")

KEYS = '''\
A message ends with its line. Lines between two lines of """ are one message. A message that begins with / needs a space before it.
Ctrl-C stops an answer.'''

# Commands of Ollama and llama.cpp -> what to do here.
HINTS = {
    **dict.fromkeys(("/regen", "/regenerate"), "try /retry"),
    "/show": "try /set, which shows the options",
    "/read": 'paste the text between two lines of """',
    "/set parameter": "try /set NAME VALUE",
    "/set system": "try /system TEXT",
    **dict.fromkeys(("/set num_ctx", "/set context_length"), "start with --context-length N"),
    "/set num_predict": "try /set max_new_tokens N",
}


def obey(session: Session, line: str) -> None:
    """Run a slash command other than /exit. Raises InputError, and errors of generating answers."""
    name, _, argument = line.partition(" ")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *ENDS], 1)
        hint = HINTS.get(name) or (f"try {near[0]}" if near else "/help lists all")
        raise InputError(
            f"there is no command {shown(name)}; {hint}, or put a space before / to send a message"
        )
    COMMANDS[name](session, argument.strip())


def _undo(session: Session, _: str) -> None:
    session.tell(f"taken back: {cut(printable(session.conversation.undo()), 60, '...')}")


def _new(session: Session, _: str) -> None:
    messages = session.conversation.messages
    messages[:] = [message for message in messages[:1] if message["role"] == "system"]
    session.tell("a new conversation")


def _system(session: Session, text: str) -> None:
    messages = session.conversation.messages
    old = 1 if messages and messages[0]["role"] == "system" else 0
    messages[:old] = [{"role": "system", "content": text}] if text else []
    session.tell("the system message is set" if text else "there is no system message now")


def _set(session: Session, text: str) -> None:
    name, _, value = text.partition(" ")
    field = name.lstrip("-").replace("-", "_")
    if text and field not in RANGES:
        near = [n for n in RANGES if n.startswith(field)] or difflib.get_close_matches(
            field, RANGES, 1
        )
        hint = f"did you mean {near[0]}? " if near else ""
        hint = f"{elsewhere}; " if (elsewhere := HINTS.get(f"/set {field}")) else hint
        raise InputError(
            f"no option is called {shown(name)}; {hint}expected one of {', '.join(map(repr, RANGES))}"
        )
    if text:
        changed: dict[str, Any] = {field: _number(field, value.strip())}
        session.params = replace(session.params, **changed)
        if field in FILTERS and not session.params.temperature:
            session.tell(f"greedy, so {field} changes nothing until /set temperature 0.7")
    values = {name: getattr(session.params, name) for name in RANGES}
    session.tell(", ".join(f"{n} {value:g}" for n, value in values.items() if value is not None))


def _number(field: str, text: str) -> float:
    """Parse `text` as the value of a field of SamplingParams. Raises InputError."""
    kind = type(RANGES[field][1])
    try:
        return msgspec.convert(text, kind, strict=False)
    except ValueError:
        whole = "whole " * (kind is int)
        raise InputError(
            f"{field} is {shown(text)}; expected a {whole}number, like /set {field} 1"
        ) from None


def _save(session: Session, name: str) -> None:
    path = _path(name)
    if path.exists() and path.resolve() not in session.files:
        raise InputError(
            f"{shown(name)} exists, and is not this conversation; choose another name, or /load it first"
        )
    session.model.save_conversation(path, session.conversation)
    session.files.add(path.resolve())
    session.tell(f"saved {len(session.conversation.messages)} messages as {printable(name)}")


def _load(session: Session, name: str) -> None:
    messages, path = session.conversation.messages, _path(name)
    messages[:] = session.model.load_conversation(path).messages
    session.files.add(path.resolve())
    session.tell(f"loaded {len(messages)} messages")
    for last in messages[-1:]:
        session.tell(f"the last, by {last['role']}: {shown_lines(last['content'])}")


def _help(session: Session, _: str) -> None:
    width = max(map(len, HELP))
    session.tell("\n".join(f"{fill(name, width)}  {what}" for name, what in HELP.items()))
    session.tell(KEYS)


# As typed -> what it does, and the function.
TYPED: dict[str, tuple[str, Callable[[Session, str], None]]] = {
    "/undo": ("take the last message and its answer back", _undo),
    "/retry": ("answer the last message again", lambda session, _: session.retry()),
    "/new": ("forget all messages but the system message", _new),
    "/clear": ("the same as /new", _new),
    "/set NAME VALUE": ("change temperature, top_p, seed and so on; without, show all", _set),
    "/system TEXT": ("set the system message; without TEXT, remove it", _system),
    "/save FILE": ("save the conversation", _save),
    "/load FILE": ("go on with a saved conversation", _load),
    "/help": ("show this", _help),
}
COMMANDS = {typed.split()[0]: run for typed, (_, run) in TYPED.items()}
HELP = {typed: what for typed, (what, _) in TYPED.items()}
HELP |= {EXIT: "end, as Ctrl-D, /quit and /bye do"}


def _path(name: str) -> Path:
    if not name or "\0" in name:
        raise InputError("no file; give its name after the command, like /save talk or /load talk")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~name of a user that does not exist
        raise InputError(f"{shown(name)}: {error} give another file") from None
