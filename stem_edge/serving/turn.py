"""A conversation and its answer in no interface's form: text, calls of tools, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.sampling import SamplingParams

ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Turn:
    """A conversation to answer. Messages and tools are in the form of OpenAI's chat completions."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None  # the only one that may be called, and must be
    parallel: bool = True  # whether several calls are allowed
    template_arguments: Mapping[str, bool | int | str | None] = field(default_factory=dict)


class End(NamedTuple):
    """The end of an answer."""

    reason: Literal["stop", "length", "tool_calls"]
    stop: str | None  # the stop text that ended it
    chunk: Chunk
