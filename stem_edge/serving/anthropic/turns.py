"""A body of Anthropic's Messages interface as a turn."""

from __future__ import annotations

from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.serving.anthropic.body import Body, Conversation
from stem_edge.serving.anthropic.conversation import messages_of, tools_of
from stem_edge.serving.refusals import RefusalError
from stem_edge.serving.turn import ToolChoice, Turn

CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def turn_of(asked: Conversation, params: SamplingParams) -> Turn:
    """Return the turn that a conversation asks for. Raises RefusalError, InputError."""
    choice = asked.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise RefusalError("tool_choice has a name if its type is 'tool'", "tool_choice.name")
    return Turn(
        messages_of(asked),
        params,
        tools=tools_of(asked.tools),
        tool_choice="auto" if choice is None else CHOICES[choice.type],
        tool_name=None if choice is None else choice.name,
        parallel=choice is None or not choice.disable_parallel_tool_use,
    )


def params_of(body: Body) -> SamplingParams:
    """Return how the answer's tokens are chosen. Raises RefusalError, InputError."""
    if body.mcp_servers:
        raise RefusalError("mcp_servers is not supported: give tools that the client runs")
    form = body.output_config.format if body.output_config is not None else None
    return SamplingParams(
        max_new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stop_sequences,
        grammar=None if form is None else Grammar.of_schema(form.schema),
    )
