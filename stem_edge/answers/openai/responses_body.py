"""The body of a request to OpenAI's Responses interface.

What is not listed is ignored, as are `store` (nothing is stored) and settings of models that reason.
Form: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from stem_edge.answers.refusals import RefusalError


class Part(msgspec.Struct):
    """A part of a message. text: of those that are text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    """A message of the input."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCall(msgspec.Struct):
    """A call of a tool in an earlier answer."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(msgspec.Struct):
    """Result of a tool."""

    call_id: str
    output: str | list[Part]


class Reasoning(msgspec.Struct):
    """Thoughts of a model in an earlier answer, as the answer here had them."""

    content: list[Part] | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
ITEMS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


class Format(msgspec.Struct, omit_defaults=True):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """Form that is wanted of the answer's text; `verbosity` is ignored."""

    format: Format | None = None


class Body(msgspec.Struct):
    """The body of `responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    metadata: dict[str, str] | None = None
    # Refused below, because an answer without them would be another than the client wants.
    max_new_tokens: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    schema: Any = None
    regex: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None


REFUSED = {
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "max_completion_tokens"), "give `max_output_tokens`"
    ),
    **dict.fromkeys(("response_format", "schema"), "give `text.format`"),
    "regex": "/v1/chat/completions has `guided_regex`",
    "previous_response_id": "this server keeps no answers; send the whole conversation as `input`",
    "conversation": "this server keeps no conversations; send all of it as `input`",
    "background": "an answer ends when its client leaves; use `stream`",
    "prompt": "this server keeps no prompts; give `instructions` and `input`",
    "top_logprobs": "log probabilities are in /v1/chat/completions",
}


def check_supported(body: Body) -> None:
    """Raise RefusalError for a field that is known and not supported."""
    for name, advice in REFUSED.items():
        if getattr(body, name):
            raise RefusalError(f"{name} is not supported: {advice}", name)
    if body.truncation == "auto":
        raise RefusalError(
            "truncation is 'auto', which is not supported: shorten `input`", "truncation"
        )


def item_of(given: dict[str, Any], where: str) -> Item:
    """Return an item of the input. Raises RefusalError."""
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise RefusalError(
            f"{where}.type is {ascii(kind)[:80]}, which is not supported; "
            f"expected one of {', '.join(ITEMS)}",
            f"{where}.type",
        )
    try:
        return msgspec.convert(given, ITEMS[kind])
    except msgspec.ValidationError as error:
        raise RefusalError(f"{where}: {error}", where) from None
