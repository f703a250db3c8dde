"""The body of a request to Anthropic's Messages interface.

What is not listed is ignored: metadata, service_tier, and marks for caching, because prompts
are kept here anyway. Form: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

COUNT = Annotated[int, msgspec.Meta(ge=1)]


class Text(msgspec.Struct, tag="text"):
    """A block of text."""

    text: str


class Image(msgspec.Struct, tag="image"):
    """A picture, which no model here can see."""


class Document(msgspec.Struct, tag="document"):
    """A file, which no model here can read."""


class Thinking(msgspec.Struct, tag="thinking"):
    """Thoughts of a model in an earlier answer."""

    thinking: str = ""


class RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    """Thoughts of a model, encrypted."""


class ToolUse(msgspec.Struct, tag="tool_use"):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResult(msgspec.Struct, tag="tool_result"):
    """Result of a tool."""

    tool_use_id: str
    content: str | list[Text | Image | Document] = ""
    is_error: bool = False


Block = Text | Image | Document | Thinking | RedactedThinking | ToolUse | ToolResult


class Message(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None  # "custom" or None; others run at Anthropic


class ToolChoice(msgspec.Struct):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Format(msgspec.Struct):
    """Form of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Form that is wanted of the answer; `effort` is ignored."""

    format: Format | None = None


class ThinkingOption(msgspec.Struct):
    """Whether the model thinks before it answers, if its template can be told; the budget is ignored."""

    type: str  # "disabled", or one of several others


class Conversation(msgspec.Struct):
    """Fields that make the prompt: the body of `count_tokens`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: str | list[Text] = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None


class Body(Conversation, kw_only=True):
    """The body of `messages`."""

    max_tokens: COUNT
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] = []
