"""Rows as requests of a scheduler, and their answers as results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, cast

import msgspec

from stem_edge.answers.events import AnswerEvents, Whole
from stem_edge.answers.openai.chat import ChatBody, completion
from stem_edge.answers.openai.completion import CompletionBody
from stem_edge.answers.openai.completion import prepare as prepare_completion
from stem_edge.answers.openai.options import Options, biases
from stem_edge.answers.openai.shapes import usage
from stem_edge.answers.refusals import MethodRefusedError, NotFoundError, RefusalError, decoded
from stem_edge.answers.token_texts import TokenTexts
from stem_edge.answers.turn import Turn, prepare
from stem_edge.batches.rows import InputRow, Result, failed, plain, responded
from stem_edge.batches.settings import Settings
from stem_edge.errors import StemEdgeError
from stem_edge.hub.names import shown_name
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingOptions, SamplingParams, params_of
from stem_edge.shown import shown

# (answers to all requests of a row, their tokens) -> result of the row.
Finish: TypeAlias = Callable[[Sequence[Whole], int], Result]


@dataclass
class _Part:
    """One of the answers to a row."""

    events: AnswerEvents
    whole: Whole


class Task:
    """The requests of a row, and what has come of their answers.

    events: makes what reads one of the answers. openai: whether the row is of OpenAI's form.
    """

    def __init__(
        self,
        row: InputRow,
        requests: Sequence[Request],
        finish: Finish,
        events: Callable[[], AnswerEvents] = AnswerEvents,
        *,
        openai: bool = True,
    ) -> None:
        self.requests = requests
        self._row, self._finish, self._openai = row, finish, openai
        self._parts = {each: _Part(events(), Whole()) for each in requests}
        self._left = len(requests)

    def push(self, request: Request, chunk: Chunk) -> Result | None:
        """Take a piece of an answer; return the result with the last one, or at the first error."""
        if chunk.error is not None:
            return self.failed(chunk.error)
        part = self._parts[request]
        for event in part.events.push(chunk):
            part.whole.add(event)
        if chunk.finish_reason is not None:
            self._left -= 1
        return None if self._left else self.result()

    def result(self) -> Result:
        """Return the result of answers that have ended."""
        tokens = sum(request.new_tokens for request in self.requests)
        return self._finish([part.whole for part in self._parts.values()], tokens)

    def failed(self, error: StemEdgeError) -> Result:
        """Return the result of an error."""
        return failed(self._row, error, openai=self._openai)


CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GRAMMARS = ("grammar", "schema", "regex")


class _Request(msgspec.Struct):
    """A row of OpenAI's form."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Tasks:
    """Makes tasks of rows."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._texts = TokenTexts(model)
        self._name = settings.name or shown_name(model.bundle.path)

    def task(self, row: InputRow) -> Task:
        """Return a row as a task, without requests if something is wrong with it."""
        openai = False
        try:
            if row.wrong is not None:
                raise RefusalError(row.wrong)
            given = decoded(row.data, dict[str, Any])
            openai = "custom_id" in given
            return self._of_openai(row) if openai else self._of_plain(row, given)
        except StemEdgeError as error:
            result = failed(row, error, openai=openai)
            return Task(row, [], lambda *_: result)

    def _of_plain(self, row: InputRow, given: dict[str, Any]) -> Task:
        given.pop("id", None)
        prompt, messages = given.pop("prompt", None), given.pop("messages", None)
        params = self._seeded(row, self._params(given))  # first, because a prompt may be misspelt
        if (prompt is None) == (messages is None):
            raise RefusalError("a row has either a prompt or messages; give one of them")
        events: Callable[[], AnswerEvents] = AnswerEvents
        if messages is not None:
            prepared = prepare(self._model, Turn(_checked(messages), params))
            [request], events = prepared.requests, prepared.events
        else:
            request = self._model.request(prompt, params)

        def finish(answers: Sequence[Whole], tokens: int) -> Result:
            [text], found = answers, answers[0].logprobs
            fields = {"text": text.text, "finish_reason": text.reason, "usage": usage([request])}
            fields |= {"reasoning_content": text.thoughts} if text.thoughts else {}
            logprobs = {} if found is None else {"logprobs": [asdict(each) for each in found]}
            return plain(row, fields | logprobs, tokens)

        return Task(row, [request], finish, events, openai=False)

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        """Return the params of a plain row: its own options before the batch's."""
        own = {name: value for name, value in given.items() if value is not None}
        if "logit_bias" in own:
            own["logit_bias"] = biases(own["logit_bias"])
        others: dict[str, Any] = {**self._settings.options}
        if any(name in own for name in GRAMMARS):
            others = {name: value for name, value in others.items() if name not in GRAMMARS}
        return params_of(None, cast(SamplingOptions, others | own))

    def _of_openai(self, row: InputRow) -> Task:
        asked = decoded(row.data, _Request)
        if asked.method != "POST":
            raise MethodRefusedError(f"method is {shown(asked.method)}; expected POST", "method")
        if asked.url == CHATS:
            return self._of_chat(row, decoded(bytes(asked.body), ChatBody))
        if asked.url == COMPLETIONS:
            return self._of_completion(row, decoded(bytes(asked.body), CompletionBody))
        known = f"expected {CHATS} or {COMPLETIONS}"
        raise NotFoundError(f"url is {shown(asked.url)}; {known}", "url")

    def _of_chat(self, row: InputRow, body: ChatBody) -> Task:
        _check_whole(body)
        turn = body.turn(self._model)
        turn = replace(turn, params=self._seeded(row, turn.params))
        prepared = prepare(self._model, turn, body.count)

        def finish(answers: Sequence[Whole], tokens: int) -> Result:
            whole = completion(self._name, answers, prepared.requests, self._texts)
            return responded(row, whole, tokens)

        return Task(row, prepared.requests, finish, prepared.events)

    def _of_completion(self, row: InputRow, body: CompletionBody) -> Task:
        _check_whole(body)
        if body.echo and body.logprobs is not None:
            raise RefusalError("batches have no log probabilities of prompts", "echo")
        params = body.sampling(self._model)
        params = None if params is None else self._seeded(row, params)
        prompts = body.prompts()
        asked = prepare_completion(self._model, self._texts, body, prompts, params)

        def finish(answers: Sequence[Whole], tokens: int) -> Result:
            return responded(row, asked.completion(self._name, answers), tokens)

        return Task(row, asked.requests if asked.generates else [], finish)

    def _seeded(self, row: InputRow, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        return replace(params, seed=self._settings.seed_of(row))


def _check_whole(body: Options) -> None:
    for name in ("stream", "stream_options"):
        if getattr(body, name):
            raise RefusalError(f"{name} is not for batches, whose results come whole", name)


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RefusalError("messages is not a list of objects with role and content", "messages")
    return messages
