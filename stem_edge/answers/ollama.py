"""Ollama's interface: requests as turns, and answers as lines of a stream or as one object.

What is not listed is ignored: keep_alive, and options of loading (num_ctx, num_gpu), because the server
has loaded its model. Form: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from stem_edge.answers.events import AnswerEvent, End, Text, Thought, Whole
from stem_edge.answers.growing import Told, call_input
from stem_edge.answers.refusals import RefusalError
from stem_edge.answers.turn import Turn, grammar_of, params_of
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.grammars.grammar import Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.text.messages import FIELDS
from stem_edge.text.tool_calls.pieces import CallEnd

# Fields of SamplingParams and of messages that have other names here.
NAMES = {"max_new_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
OF_MESSAGES = {"thinking": "reasoning_content", "tool_name": "name"}
# Field -> what to do instead; refused, because an answer without it would be another one.
REFUSED = {
    "images": "this model reads text only",
    "suffix": "this model continues texts",
    "template": "the model's own is used; give raw for a prompt as it is",
    "context": "send the whole conversation to /api/chat",
    "logprobs": "/v1/chat/completions has them",
}


class Options(msgspec.Struct):
    """How tokens are chosen. A negative num_predict is as many as the context holds."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = msgspec.field(default=None, name="repeat_penalty")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_new_tokens: int | None = msgspec.field(default=None, name="num_predict")


class Body(msgspec.Struct, kw_only=True):
    """The body of `chat`, which has messages and tools, or of `generate`, which has a prompt."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the model's template
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    images: Any = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    logprobs: Any = None

    def turn(self, model: Model) -> Turn | None:
        """Return the conversation to answer; None: only load the model. Raises RefusalError."""
        messages = [_message(each) for each in self.messages or ()]
        for role, text in (("system", self.system), ("user", self.prompt)):
            messages += [{"role": role, "content": text}] if text else []
        params, tools = self.params(model), self.tools or ()
        thinking = {} if self.think is None else {"enable_thinking": bool(self.think)}
        if not (self.messages or self.prompt):
            return None
        if self.raw and (self.messages or self.system):
            raise RefusalError("raw takes prompt alone, without messages and system", "raw")
        return Turn(messages, params, "format", tools, template_arguments=thinking)

    def params(self, model: Model) -> SamplingParams:
        """Return what to sample by, where nothing is given the model's own. Raises RefusalError."""
        _check(self)
        options = msgspec.structs.asdict(self.options or Options())
        given = {name: value for name, value in options.items() if value is not None}
        most, held = given.pop("max_new_tokens", -1), model.plan.context_length
        given["max_new_tokens"] = held if most < 0 else min(most, held)
        if "seed" in given:
            given["seed"] %= 2**64
        if self.format:
            schema = {"type": "object"} if self.format == "json" else self.format
            given["grammar"] = grammar_of("format", Grammar.of_schema, schema)
        return params_of(model, NAMES, **given)


def _check(given: Body | Mapping[str, Any]) -> None:
    """Raise RefusalError for what a body or a message has and is not supported."""
    for name, instead in REFUSED.items():
        if given.get(name) if isinstance(given, Mapping) else getattr(given, name):
            raise RefusalError(f"{name} is not supported: {instead}", name)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat completions have it."""
    _check(given)
    told = {OF_MESSAGES.get(name, name): value for name, value in given.items()}
    return {name: told[name] for name in ("role", *FIELDS) if told.get(name) is not None}


class AnswerLines:
    """Makes the lines of an answer, or a single one. name: of the model. chat: the text is a message's."""

    def __init__(self, name: str, *, chat: bool, stream: bool) -> None:
        self._name, self._chat, self._stream = name, chat, stream
        self._whole, self._began = Whole(), time.perf_counter()

    def add(self, event: AnswerEvent, request: Request) -> Told | None:
        """Return the line of an event, if it has one; a call is told when it is complete."""
        found = self._whole
        found.add(event)
        match event:
            case End():
                return self._last(request)
            case Text(text) if text and self._stream:
                return self.line(text)
            case Thought(text) if self._stream:
                return self.line(thinking=text)
            case CallEnd(index) if self._stream:
                return self.line(tool_calls=_calls(found.calls[index : index + 1]))
        return None

    def line(self, text: str = "", **more: Any) -> Told:
        """Return a line with more of the answer."""
        more = {name: value for name, value in more.items() if value}
        said = {"role": "assistant", "content": text} if self._chat else {"response": text}
        told = {"message": said | more} if self._chat else said | more
        return {"model": self._name, "created_at": date(time.time()), **told, "done": False}

    def _last(self, request: Request) -> Told:
        found = Whole() if self._stream else self._whole
        line = self.line(found.text, thinking=found.thoughts, tool_calls=_calls(found.calls))
        seconds = {
            "total_duration": time.perf_counter() - self._began,
            "load_duration": 0,
            "prompt_eval_duration": request.prompt_seconds,
            "eval_duration": request.decode_seconds,
        }
        return line | {
            "done": True,
            "done_reason": "length" if self._whole.reason == "length" else "stop",
            "prompt_eval_count": request.prompt_tokens,
            "eval_count": request.new_tokens,
            **{name: round(value * 1e9) for name, value in seconds.items()},
        }


def _calls(calls: Sequence[dict[str, str]]) -> list[Told]:
    each = ((call["name"], call_input(call["arguments"])) for call in calls)
    return [{"function": {"name": name, "arguments": arguments}} for name, arguments in each]


def date(seconds: float) -> str:
    """Return a date, given in seconds since 1970, as this interface writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
