"""The input and tools of a request to the Responses interface in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stem_edge.answers.openai.responses_body import (
    Body,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Part,
    Reasoning,
    item_of,
)
from stem_edge.answers.refusals import RefusalError
from stem_edge.answers.turn import ToolChoice, grammar_of
from stem_edge.runtime.grammars.grammar import Grammar

TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(body: Body) -> list[dict[str, Any]]:
    """Return messages as chat completions have them. Raises RefusalError."""
    messages = list[dict[str, Any]]()
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    names = dict[str, str]()  # of tools, by the ids of their calls
    for number, given in enumerate(body.input):
        where = f"input[{number}]"
        _add(messages, item_of(given, where), names, where)
    return messages


def _add(messages: list[dict[str, Any]], item: Item, names: dict[str, str], where: str) -> None:
    match item:
        case Message(role, content):
            told: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content")}
            if role == "assistant" and _is_thought(messages[-1:]):
                told = messages.pop() | told
            messages.append(told)
        case Reasoning(content) if content:
            thought = "".join(part.text or "" for part in content)
            told = {"role": "assistant", "content": "", "reasoning_content": thought}
            messages.append(told)
        case FunctionCall(call_id, name, arguments):
            names[call_id] = name
            function = {"name": name, "arguments": arguments}
            _calls(messages).append({"id": call_id, "type": "function", "function": function})
        case FunctionCallOutput(call_id, output):
            told = {"role": "tool", "tool_call_id": call_id}
            told |= {"name": names[call_id]} if call_id in names else {}
            messages.append({**told, "content": _content(output, f"{where}.output")})
        case _:
            pass


def _is_thought(last: list[dict[str, Any]]) -> bool:
    """Return whether the last message has thoughts whose answer is another item."""
    return bool(last and last[0].get("reasoning_content") and not last[0]["content"])


def _calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of the answer that comes last: here they are items beside its text."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls: list[dict[str, Any]] = messages[-1].setdefault("tool_calls", [])
    return calls


def _content(content: str | Sequence[Part], where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    parts = list[dict[str, str]]()
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXT_PARTS, "refusal") or text is None:
            raise RefusalError(
                f"{where}[{number}] is of type {ascii(part.type)[:80]} or has no text; this model reads "
                f"text only: expected one of {', '.join(TEXT_PARTS)} with text",
                f"{where}[{number}]",
            )
        parts.append({"type": "text", "text": text})
    return parts


def tools_of(body: Body) -> list[dict[str, Any]]:
    """Return tools as chat completions have them. Raises RefusalError for those that run elsewhere."""
    tools = list[dict[str, Any]]()
    for number, tool in enumerate(body.tools or []):
        where = f"tools[{number}]"
        if tool.get("type") != "function":
            raise RefusalError(
                f"{where}.type is {ascii(tool.get('type'))[:80]}, which is not supported; "
                "expected 'function'",
                f"{where}.type",
            )
        if not isinstance(tool.get("name"), str):
            raise RefusalError(f"{where} has no name; give one", f"{where}.name")
        function = {
            key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)
        }
        tools.append({"type": "function", "function": function})
    return tools


def choice_of(body: Body) -> tuple[ToolChoice, str | None]:
    """Return whether tools may or must be called, and the name of the only one. Raises RefusalError."""
    match body.tool_choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "name": str(name)}:
            return "required", name
    raise RefusalError(
        f"tool_choice is {ascii(body.tool_choice)[:80]}, which is not supported; expected 'auto', "
        "'none', 'required' or {'type': 'function', 'name': ...}",
        "tool_choice",
    )


def format_of(body: Body) -> Grammar | None:
    """Return the grammar of the answer's text; None: any text. Raises RefusalError."""
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.of_schema({"type": "object"})
    if form.schema is None:
        raise RefusalError("text.format has no schema; give a JSON Schema", "text.format.schema")
    return grammar_of("text.format", Grammar.of_schema, form.schema)
