"""Requests of Anthropic's Messages interface as turns, with messages and tools in the form that templates take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stem_edge.answers.anthropic.body import (
    Block,
    Body,
    Conversation,
    Document,
    Image,
    Message,
    Text,
    Thinking,
    Tool,
    ToolResult,
    ToolUse,
)
from stem_edge.answers.refusals import RefusalError
from stem_edge.answers.turn import ToolChoice, Turn, grammar_of, params_of
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams

CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}
FORMAT = "output_config.format"


def turn_of(asked: Conversation, params: SamplingParams) -> Turn:
    """Return the turn that a conversation asks for. Raises RefusalError, InputError."""
    choice = asked.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise RefusalError("tool_choice has a name if its type is 'tool'", "tool_choice.name")
    told = asked.thinking
    return Turn(
        messages_of(asked),
        params,
        grammar_field=FORMAT,
        tools=tools_of(asked.tools),
        tool_choice="auto" if choice is None else CHOICES[choice.type],
        tool_name=None if choice is None else choice.name,
        parallel=choice is None or not choice.disable_parallel_tool_use,
        template_arguments={"enable_thinking": told.type != "disabled"} if told else {},
    )


def sampling_of(model: Model, body: Body) -> SamplingParams:
    """Return how the answer's tokens are chosen, and how many at most. Raises RefusalError."""
    if body.mcp_servers:
        raise RefusalError("mcp_servers is not supported: give tools that the client runs")
    form = body.output_config.format if body.output_config is not None else None
    return params_of(
        model,
        NAMES,
        max_new_tokens=min(body.max_tokens, model.plan.context_length),
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        grammar=None if form is None else grammar_of(FORMAT, Grammar.of_schema, form.schema),
    )


ERROR = "Error: "  # before what a tool returned that failed; templates have no other place for it


def messages_of(asked: Conversation) -> list[dict[str, Any]]:
    """Return messages as chat completions have them. Raises RefusalError for pictures and files."""
    messages = list[dict[str, Any]]()
    if asked.system:
        system = asked.system if isinstance(asked.system, str) else _parts(asked.system, "system")
        messages.append({"role": "system", "content": system})
    names = dict[str, str]()  # of tools, by the ids of their calls
    for number, message in enumerate(asked.messages):
        where = f"messages[{number}].content"
        if message.role == "user":
            messages.extend(_of_user(message, names, where))
        else:
            messages.append(_of_assistant(message, names, where))
    return messages


def _of_user(message: Message, names: Mapping[str, str], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools come first: templates expect them right after the calls."""
    if isinstance(message.content, str):
        yield {"role": "user", "content": message.content}
        return
    rest = list[Block]()
    for block in message.content:
        if isinstance(block, ToolResult):
            yield _of_result(block, names, where)
        else:
            rest.append(block)
    if rest:
        yield {"role": "user", "content": _parts(rest, where)}


def _of_result(block: ToolResult, names: Mapping[str, str], where: str) -> dict[str, Any]:
    content: str | list[dict[str, str]]
    if isinstance(block.content, str):
        content = (ERROR if block.is_error else "") + block.content
    else:
        begin = [Text(ERROR)] if block.is_error else []
        content = _parts([*begin, *block.content], where)
    told = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    name = names.get(block.tool_use_id)
    return told if name is None else {**told, "name": name}


def _of_assistant(message: Message, names: dict[str, str], where: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    calls = [block for block in message.content if isinstance(block, ToolUse)]
    names.update({call.id: call.name for call in calls})
    thoughts = [block.thinking for block in message.content if isinstance(block, Thinking)]
    rest = [block for block in message.content if not isinstance(block, ToolUse)]
    told: dict[str, Any] = {"role": "assistant", "content": _parts(rest, where)}
    if calls:
        told["tool_calls"] = [_call(call) for call in calls]
    if thoughts:  # templates show earlier turns' or leave them out
        told["reasoning_content"] = "".join(thoughts)
    return told


def _call(call: ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.input).decode()
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _parts(blocks: Sequence[Block], where: str) -> list[dict[str, str]]:
    parts = list[dict[str, str]]()
    for block in blocks:
        if isinstance(block, Image | Document):
            kind = "image" if isinstance(block, Image) else "document"
            raise RefusalError(
                f"{where}: {kind} input is not supported, because the model reads text only; "
                "give its text",
                where,
            )
        if isinstance(block, Text):
            parts.append({"type": "text", "text": block.text})
    return parts


def tools_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat completions have them. Raises RefusalError for those that run elsewhere."""
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise RefusalError(
                f"tools[{number}] ({tool.name}) is of type {tool.type or 'unknown'}, which this server "
                "does not run; give tools with an input_schema, which the client runs",
                f"tools[{number}].type",
            )
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    ]
