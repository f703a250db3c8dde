"""Checks and copies the messages and tools of a conversation, which are in OpenAI's format.

Texts are not changed. `texts` yields them, because callers must check that no text contains the
name of a special token, which could fake another message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stem_edge.errors import InputError
from stem_edge.shown import printable, shown

MAX_MESSAGES = 4096
MAX_MESSAGE_CHARS = 1 << 19  # of all messages together, and of all tools
MAX_TOOLS = 256
MAX_DEPTH = 64  # of nested arguments and parameters; templates recurse into them
MAX_TEMPLATE_ARGUMENTS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")
OF_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
Object = dict[str, Any]


def checked_messages(messages: object) -> list[Object]:
    """Check and copy messages: each has a role, a text as content, and optional fields.

    Tool calls become {"id", "type", "function": {"name", "arguments"}}. Arguments become an object, as
    most templates need. A message with tool calls but no content gets "". Raises InputError.
    """
    given = _listed("messages", messages, 1, MAX_MESSAGES)
    checked = [_message(f"messages[{number}]", message) for number, message in enumerate(given)]
    fields = (
        (f"messages[{number}].{name}", value)
        for number, message in enumerate(checked)
        for name, value in message.items()
        if name != "role"
    )
    _check_texts("messages", fields, "shorten them")
    return checked


def checked_tools(tools: object) -> list[Object] | None:
    """Check and copy OpenAI's list of tools; return None if there are none. Raises InputError."""
    if tools is None or (isinstance(tools, Sequence) and not tools):
        return None
    given = _listed("tools", tools, 1, MAX_TOOLS)
    checked = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in checked]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"tools[{number}].function.name is {name!a} again; give each its own")
    _check_texts("tools", [("tools", checked)], "give fewer, or shorter descriptions")
    return checked


def checked_template_arguments(arguments: object) -> Object:
    """Check and copy variables for a chat template, such as enable_thinking. Raises InputError."""
    where = "template_arguments"
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise InputError(
            f"{where} is not of the expected form: an object of at most "
            f"{MAX_TEMPLATE_ARGUMENTS} values"
        )
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier() or name in OF_TEMPLATES:
            raise InputError(
                f"{where} has {shown(name)}, expected the name of a variable, other than "
                f"{', '.join(OF_TEMPLATES)}"
            )
        if not isinstance(value, bool | int | str | None):
            raise InputError(
                f"{where}.{name} is of type {type(value).__name__}, expected a truth value, a whole "
                "number, a text or null"
            )
    _check_texts(where, [(where, dict(arguments))], "shorten them")
    return dict(arguments)


def texts(where: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (place, text) for texts and keys in a JSON value. A place is like "tools[0].type"."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield f"a name in {where}", name
            yield from texts(f"{where}.{name}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from texts(f"{where}[{number}]", item)


def _message(where: str, message: object) -> Object:
    called = isinstance(message, Mapping) and message.get("tool_calls")
    needed, form = (
        ["role", *(() if called else ("content",))],
        '{"role": "user", "content": "text"}',
    )
    given = _object(where, message, needed, FIELDS, form=form)
    role = given.pop("role")
    if role not in ROLES:
        raise InputError(f"{where}.role is {shown(role)}, expected one of: {', '.join(ROLES)}")
    if "tool_calls" in given and role != "assistant":
        raise InputError(
            f"{where} of {role!a} has tool_calls, which only an assistant makes; remove them"
        )
    checked = {"role": role, "content": ""}
    checked |= {name: FIELDS[name](f"{where}.{name}", value) for name, value in given.items()}
    # Templates ask whether there are tool calls by asking for the key.
    return {name: value for name, value in checked.items() if name != "tool_calls" or value}


def _content(where: str, content: object) -> str:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return _text(where, content)
    return "".join(_part(f"{where}[{number}]", part) for number, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text"):
        raise InputError(
            f"{where} is {shown(kind or part)}, which this model cannot read; give parts of the "
            'form {"type": "text", "text": "..."}'
        )
    return _text(f"{where}.text", part.get("text") if isinstance(part, Mapping) else None)


def _text(where: str, text: object) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where} is of type {type(text).__name__}, expected a text")
    return text


def _calls(where: str, calls: object) -> list[Object]:
    given = _listed(where, calls, 0, MAX_TOOLS)
    return [_call(f"{where}[{number}]", call) for number, call in enumerate(given)]


def _call(where: str, call: object) -> Object:
    form = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
    # Clients that join the parts of a streamed call also send its index.
    given, function = _function(where, call, ("name", "arguments"), (), form)
    return {
        "id": _text(f"{where}.id", given.get("id", "")),
        "type": "function",
        "function": {
            "name": _name(f"{where}.function.name", function["name"]),
            "arguments": _arguments(f"{where}.function.arguments", function["arguments"]),
        },
    }


def _arguments(where: str, arguments: object) -> Object:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InputError(f"{where} is not JSON: {shown(arguments)}; give an object") from None
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where} is of type {type(arguments).__name__}, expected a JSON object")
    copied: Object = _copied(where, arguments)
    return copied


def _tool(where: str, tool: object) -> Object:
    form = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
    optional = ("description", "parameters", "strict")
    _, function = _function(where, tool, ("name",), optional, form)
    where += ".function"
    checked: Object = {"name": _name(f"{where}.name", function["name"])}
    checked["description"] = _text(f"{where}.description", function.get("description", ""))
    parameters = _arguments(f"{where}.parameters", function.get("parameters", {}))
    # Filled in, because templates print both without asking whether they are there.
    checked["parameters"] = parameters or {"type": "object", "properties": {}}
    if not isinstance(function.get("strict", False), bool):
        raise InputError(f"{where}.strict is {shown(function['strict'])}, expected true or false")
    return {"type": "function", "function": checked}


def _function(
    where: str, value: object, needed: Sequence[str], optional: Sequence[str], form: str
) -> tuple[Object, Object]:
    """Check a tool or tool call; return it and its "function". where, form: for errors."""
    given = _object(where, value, ("function",), ("id", "type", "index"), form=form)
    if given.get("type", "function") != "function":
        raise InputError(f"{where}.type is {shown(given['type'])}, expected 'function'")
    return given, _object(f"{where}.function", given["function"], needed, optional, form=form)


def _name(where: str, name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{where} is {shown(name)}, expected 1 to 64 letters, digits, underscores or hyphens"
        )
    return name


def _object(
    where: str,
    value: object,
    needed: Sequence[str],
    optional: Sequence[str] | Mapping[str, object] = (),
    *,
    form: str,
) -> Object:
    """Return the object `value` without keys whose value is None. Raises InputError.

    It must have the keys `needed`, and may have the keys `optional`. where, form: for errors.
    """
    if isinstance(value, Mapping):
        given = {name: item for name, item in value.items() if item is not None}
        known = {*needed, *optional}
        if known.issuperset(given) and given.keys() >= set(needed):
            return given
    raise InputError(f"{where} is not of the form {form}; give these keys")


def _listed(where: str, value: object, least: int, most: int) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"{where} is of type {type(value).__name__}, expected a list")
    if not least <= len(value) <= most:
        raise InputError(f"there are {len(value)} {where}, expected {least} to {most}")
    return value


def _copied(where: str, value: object, depth: int = 0) -> Any:
    """Copy a JSON value. Raises InputError if it is not JSON, or nested too deep."""
    if depth > MAX_DEPTH:
        raise InputError(f"{where} is nested more than {MAX_DEPTH} deep; make it flatter")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _copied(where, item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(where, item, depth + 1) for item in value]
    raise InputError(f"{where} has {shown(value)}, which JSON does not have; remove it")


def _check_texts(what: str, values: Iterable[tuple[str, object]], remedy: str) -> None:
    """Raise InputError if texts in (place, value) pairs are not Unicode, or too long in total."""
    count = 0
    for place, text in (found for where, value in values for found in texts(where, value)):
        count += len(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as bytes of a terminal that are not UTF-8
            raise InputError(
                f"{printable(ascii(place)[1:-1])} is not valid Unicode ({error}); give it as UTF-8"
            ) from None
    if count > MAX_MESSAGE_CHARS:
        raise InputError(
            f"the {what} have {count:,} characters, expected at most {MAX_MESSAGE_CHARS:,}; "
            f"{remedy}"
        )


FIELDS: Mapping[str, Callable[[str, object], object]] = {
    "content": _content,
    "name": _text,
    "reasoning_content": _text,
    "tool_calls": _calls,
    "tool_call_id": _text,
}
