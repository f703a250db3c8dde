"""OpenAI's chat completions: JSON of requests, responses and streamed chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stem_edge.apps.answers.events import AnswerEvent, AnswerEvents, End, Text, Thought, Whole
from stem_edge.apps.answers.openai.options import Options
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.apps.answers.token_texts import TokenTexts
from stem_edge.apps.answers.turn import ToolChoice, prepare
from stem_edge.runtime.model import Model
from stem_edge.runtime.scheduling.request import Request
from stem_edge.text.messages import Message
from stem_edge.text.tool_calls.parser import Call


class ChatBody(Options, kw_only=True):
    logprobs_field = "top_logprobs"
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked(self, model: Model, texts: TokenTexts) -> AskedChat:
        """Tokenize the chat. texts: token texts for log probabilities. Raises InputError, RefusalError."""
        choice, tool = self._choice()
        requests, reader = prepare(
            model,
            # Without unknown fields, because clients send earlier answers back with all fields.
            [
                {n: v for n, v in each.items() if n in Message.__struct_fields__}
                for each in self.messages
            ],
            self.params(model, self._most(model), self._logprobs()),
            self.count,
            grammar_field=self.grammar_field,
            tools=self.tools or (),
            choice=choice,
            tool_name=tool,
            parallel=self.parallel_tool_calls is not False,
            template_arguments=self.chat_template_kwargs,
        )
        return AskedChat(self, texts, requests, reader)

    def _most(self, model: Model) -> int:
        """Return the largest number of answer tokens, up to the context. Raises RefusalError."""
        most, name = self.max_completion_tokens, "max_completion_tokens"
        if most is None:
            most, name = self.max_tokens, "max_tokens"
        if most is None:
            return model.plan.context_length
        if most < 1:
            raise RefusalError(f"{name} is {most}; expected at least 1", name)
        return min(most, model.plan.context_length)

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise RefusalError("top_logprobs needs logprobs: true", "top_logprobs")
        return None

    def _choice(self) -> tuple[ToolChoice, str | None]:
        match self.tool_choice:
            case None:
                return "auto", None
            case "none" | "auto" | "required" as choice:
                return choice, None
            case {"type": "function", "function": {"name": str(name)}}:
                return "auto", name
        raise RefusalError(
            "tool_choice is of an unknown form; expected none, auto, required, or "
            '{"type": "function", "function": {"name": "..."}}',
            "tool_choice",
        )


@dataclass(frozen=True)
class AskedChat:
    """A tokenized chat request, which also formats its answers as JSON."""

    body: ChatBody
    texts: TokenTexts
    requests: list[Request]
    reader: Callable[[], AnswerEvents]
    begun: set[int] = field(default_factory=set)  # indexes of choices that have begun to stream
    generates = True
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choices(self, number: int, piece: AnswerEvent) -> list[dict[str, Any]]:
        """Convert an event of an answer to OpenAI's choices; the first one also sends the role."""
        found = (
            [] if number in self.begun else [_delta(number, {"role": "assistant", "content": None})]
        )
        self.begun.add(number)
        match piece:
            case Thought(text):
                more = _delta(number, {"reasoning_content": text})
            case Text(text, logprobs):
                told = None if logprobs is None else self.texts.chat_logprobs(logprobs)
                more = _delta(number, {"content": text}, logprobs=told)
            case Call():
                calls = [{"index": piece.index} | call_object(piece)]
                more = _delta(number, {"tool_calls": calls})
            case End(reason):
                more = _delta(number, {}, finish_reason=reason)
        return [*found, more]

    def whole(self, answers: Sequence[Whole]) -> list[dict[str, Any]]:
        """Return the choices of a response that is not streamed: one for each answer."""
        return [_choice(index, each, self.texts) for index, each in enumerate(answers)]


def _delta(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more


def _choice(index: int, answer: Whole, texts: TokenTexts) -> dict[str, Any]:
    calls, found = [call_object(call) for call in answer.calls], answer.logprobs
    content = answer.text or (None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None}
    thoughts = {"reasoning_content": answer.thoughts} if answer.thoughts else {}
    return {
        "index": index,
        "message": message | thoughts | ({"tool_calls": calls} if calls else {}),
        "logprobs": None if found is None else texts.chat_logprobs(found),
        "finish_reason": answer.reason,
    }


def call_object(call: Call) -> dict[str, Any]:
    """Return a tool call as OpenAI writes it in JSON."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
