"""A conversation and its answer in no interface's form: text, calls of tools, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from anyio import to_thread

from stem_edge.errors import InputError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import SamplingParams, TokenLogprobs
from stem_edge.serving.reply import Reply
from stem_edge.serving.service import Service

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
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


class Text(NamedTuple):
    """More text of an answer; tokens may come without text, which is not certain yet."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None  # of these tokens, if asked for


class CallBegin(NamedTuple):
    """A call of a tool begins."""

    index: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of a call: a piece of JSON."""

    index: int
    text: str


class CallEnd(NamedTuple):
    """The arguments of a call are complete."""

    index: int


class End(NamedTuple):
    """The end of an answer."""

    reason: Literal["stop", "length", "tool_calls"]
    stop: str | None  # the stop text that ended it


Event: TypeAlias = Text | CallBegin | CallArguments | CallEnd | End


class Answering:
    """The answer to a turn, under way; leaving the context manager early cancels it."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events, `End` as the last. Raises the error that ended the answer."""
        async for chunk in self.reply:
            if chunk.text or chunk.token_ids:
                yield Text(chunk.text, chunk.token_ids, chunk.logprobs)
            if chunk.finish_reason is not None:
                yield End("length" if chunk.finish_reason == "length" else "stop", chunk.stop)


class Answers(ExitStack):
    """Answers to one turn; leaving the context manager early cancels those that have not ended."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__()
        self.all = [self.enter_context(Answering(reply)) for reply in replies]

    @property
    def first(self) -> Answering:
        """The only one, if no more were asked for."""
        return self.all[0]


async def begin(service: Service, turn: Turn, count: int = 1) -> Answers:
    """Queue a turn, `count` times with seeds that follow each other; enter the result at once.

    Raises InputError for a turn that the model cannot take, and what Compute.submit raises.
    """
    requests = await to_thread.run_sync(turn_requests, service.model, turn, count)
    return Answers(service.compute.submit(requests))


def turn_requests(model: Model, turn: Turn, count: int) -> list[Request]:
    """Render and tokenize a turn, and make its requests. Raises InputError."""
    ids = prompt_ids(model, turn)
    return [model.request(ids, params) for params in seeded(turn.params, count)]


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return params for several answers to one prompt: the same, with seeds that follow each other."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=(params.seed + number) % 2**64) for number in range(count)]


def prompt_ids(model: Model, turn: Turn) -> list[int]:
    """Return the token ids of a conversation, by the bundle's template if it has one."""
    if turn.tools and turn.tool_choice != "none":
        raise InputError("tools: the chat template of this model takes none")
    if not turn.messages:
        raise InputError("messages is empty; give at least one message")
    if model.has_chat_template:
        text = model.chat_prompt(turn.messages)
        return model.tokenize(text, add_special_tokens=False, special_tokens_in_text=True)
    return model.tokenize("".join(str(message.get("content")) for message in turn.messages))
