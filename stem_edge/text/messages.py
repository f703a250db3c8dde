"""Checks and copies the messages and tools of a conversation, which are in OpenAI's format.

Texts are not changed. `texts` yields them, because callers must check that no text contains the
name of a special token, which could fake another message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from stem_edge.errors import InputError
from stem_edge.shown import printable, shown

MAX_MESSAGES = 4096
MAX_MESSAGE_CHARS = 1 << 19  # of all messages together, and of all tools
MAX_TOOLS = 256
MAX_DEPTH = 64  # of nested arguments and parameters; templates recurse into them
MAX_TEMPLATE_ARGUMENTS = 64
OF_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`$")  # at the end of msgspec's messages
STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
# End of a place, without numbers -> what to give there. msgspec's words are not enough.
REMEDIES = {
    "[].role": "give system, developer, user, assistant or tool",
    ".content[].type": 'only text can be read; give parts like {"type": "text", "text": "..."}',
    "[].type": "give function, the only type of tools here",
    ".function.name": "give 1 to 64 of the characters a-z, A-Z, 0-9, _ and -",
}
Object = dict[str, Any]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
F = TypeVar("F")


class Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    arguments: str | dict[Any, Any]

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            try:
                self.arguments = msgspec.json.decode(self.arguments or "{}", type=dict[Any, Any])
            except (ValueError, RecursionError):
                raise ValueError("Expected `arguments` that are a JSON object") from None
        self.arguments = _copied(self.arguments)


class OfferedFunction(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[Any, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        self.description, self.strict = self.description or "", None
        # Filled in, because templates print both without asking whether they are there.
        self.parameters = _copied(self.parameters) or {"type": "object", "properties": {}}


class Tool(
    msgspec.Struct, Generic[F], forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A tool with the function that it offers, or a call of a tool."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: F
    index: int | None = None

    def __post_init__(self) -> None:
        self.id, self.type = self.id or "", "function"
        self.index = None  # left out: clients that join the parts of a streamed call send it


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Tool[CalledFunction]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("Expected `content`, a text")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("Expected no `tool_calls`, which only an assistant makes")
        if not isinstance(self.content, str):
            self.content = "".join(part.text for part in self.content or ())
        # Templates ask whether there are tool calls by asking for the key.
        self.tool_calls = self.tool_calls or None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool[OfferedFunction]], Meta(max_length=MAX_TOOLS)]
# On import, because Ctrl-C while msgspec reads types would crash it.
msgspec.convert([[], []], tuple[list[Message], Tools])
Arguments = Annotated[dict[str, bool | int | str | None], Meta(max_length=MAX_TEMPLATE_ARGUMENTS)]


def checked_messages(messages: object) -> list[Object]:
    """Check and copy messages: each has a role, a text as content, and optional fields.

    Tool calls become {"id", "type", "function": {"name", "arguments"}}. Arguments become an object, as
    most templates need. A message with tool calls but no content gets "". Raises InputError.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        messages = [_without_nulls(message) for message in messages]
    given = _converted("messages", messages, Messages)
    checked: list[Object] = msgspec.to_builtins(given, enc_hook=_plain)
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
    given: list[Tool[OfferedFunction]] = _converted("tools", () if tools is None else tools, Tools)
    functions = [msgspec.to_builtins(tool.function, enc_hook=_plain) for tool in given]
    names = [function["name"] for function in functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"tools[{number}].function.name is {name!a} again; give each its own")
    checked = [{"type": "function", "function": function} for function in functions]
    _check_texts("tools", [("tools", checked)], "give fewer, or shorter descriptions")
    return checked or None


def checked_template_arguments(arguments: object) -> Object:
    """Check and copy variables for a chat template, such as enable_thinking. Raises InputError."""
    where = "template_arguments"
    checked: Object = _converted(where, {} if arguments is None else arguments, Arguments)
    for name in checked:
        if not name.isidentifier() or name in OF_TEMPLATES:
            raise InputError(
                f"{where} has {shown(name)}, expected the name of a variable, other than "
                f"{', '.join(OF_TEMPLATES)}"
            )
    _check_texts(where, [(where, checked)], "shorten them")
    return checked


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


def _without_nulls(message: object) -> object:
    if not isinstance(message, Mapping):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _converted(what: str, value: Any, kind: Any) -> Any:
    """Convert a value to `kind`, a type for msgspec. Raises InputError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, place, *_ = [*PLACE.split(str(error)), ""]
        for name, number in STEP.findall(place):
            value = value[name] if name else [*value][int(number)]
        end = re.sub(r"\d+", "", place)
        remedy = f"{printable(message)}; give other {what}"
        remedy = next((REMEDIES[each] for each in REMEDIES if end.endswith(each)), remedy)
        raise InputError(f"{what}{place} is {shown(value)}: {remedy}") from None
    except UnicodeEncodeError as error:  # in a key, or where only some texts are allowed
        raise InputError(f"{what} are not valid Unicode ({error}); give them as UTF-8") from None


def _plain(value: object) -> object:
    """Convert a value whose class is derived from str, int or float, such as numpy.str_."""
    return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))


def _copied(value: Any, depth: int = 0) -> Any:
    """Copy a JSON value. Raises ValueError if it is not JSON, or nested too deep."""
    if depth > MAX_DEPTH:
        raise ValueError(f"Expected JSON that is nested at most {MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _copied(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, depth + 1) for item in value]
    raise ValueError(f"Expected JSON, got {shown(value)}")


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
