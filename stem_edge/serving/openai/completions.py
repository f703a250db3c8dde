"""Completions of texts, and log probabilities of given ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.runtime.batching.request import Request as Prompted
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scoring import Scorer
from stem_edge.serving.answers import Answering, Answers, End, Event, Text, merged
from stem_edge.serving.bodies import json_response, read
from stem_edge.serving.error_bodies import openai_error
from stem_edge.serving.openai.completion_body import CompletionBody
from stem_edge.serving.openai.shapes import DONE, head, usage
from stem_edge.serving.service import Service, service_of
from stem_edge.serving.streams import EventStream, event, until_disconnected
from stem_edge.serving.timings import timings
from stem_edge.serving.turn import seeded


async def completions(request: Request) -> Response:
    """Continue prompts, or give the log probabilities of given ones, or both."""
    service = service_of(request)
    body = await read(request, CompletionBody)
    with_usage = body.with_usage
    asked = await to_thread.run_sync(_prepare, service, body)
    if body.echo and body.logprobs is not None:
        await until_disconnected(request, asked.score())
    submitted = service.compute.submit(asked.requests) if asked.generates else []
    answers = Answers([Answering(reply, None) for reply in submitted])
    if body.stream:
        events = _events(asked, answers, with_usage=with_usage)
        return EventStream(events, answers, lambda error: event(openai_error(error)))
    with answers:
        return json_response(await until_disconnected(request, _whole(asked, answers)))


@dataclass(frozen=True)
class _Echo:
    """What stands before an answer: nothing, or the prompt."""

    text: str
    found: list[TokenLogprobs | int]  # its tokens, the first without log probabilities


@dataclass(frozen=True)
class _Asked:
    """A request that is tokenized and can be submitted: `count` answers to each prompt in turn."""

    service: Service
    body: CompletionBody
    requests: list[Prompted]
    echoes: list[_Echo]  # of each prompt
    count: int
    generates: bool  # whether new tokens are asked for

    async def score(self) -> None:
        """Find the log probabilities of the prompts."""
        found = await self.service.compute.compute(self._scores())
        for number, logprobs in found:
            self.echoes[number].found.extend(logprobs)

    def _scores(self) -> Iterator[tuple[int, list[TokenLogprobs]] | None]:
        """Yield (number of the prompt, log probabilities of some tokens), or None to wait for memory.

        From the compute thread.
        """
        scorer, compute = Scorer(self.service.model, reuse=False), self.service.compute
        for number, request in enumerate(self.requests[:: self.count]):
            while (room := compute.room(request.prompt_tokens)) is None:
                yield None
            if request.prompt_tokens > 1:
                with room:
                    for logprobs in scorer.text(request.prompt, self.body.logprobs or 0):
                        yield number, logprobs

    def choice(
        self,
        number: int,
        text: str,
        found: list[TokenLogprobs] | None = None,
        *,
        first: bool,
        offset: int = 0,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a choice, or a piece of one. first: after the echo. offset: characters before."""
        echo = self.echoes[number // self.count] if first else _Echo("", [])
        logprobs, tokens = None, [*echo.found, *(found or ())]
        if tokens:
            logprobs = self.service.token_texts.logprobs(tokens, offset)
        text = echo.text + text
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": reason}


def _prepare(service: Service, body: CompletionBody) -> _Asked:
    """Tokenize prompts, and make their requests. Raises InputError."""
    model, count, echoes = service.model, body.count, list[_Echo]()
    params, requests = body.sampling(model), list[Prompted]()
    for prompt in body.prompts():
        each = [model.request(prompt, one) for one in seeded(params or SamplingParams(), count)]
        requests += each
        ids, text = each[0].prompt, ""
        if body.echo:
            text = model.detokenize(ids, skip_special_tokens=False)
            text = prompt if isinstance(prompt, str) else text
        scored = body.echo and body.logprobs is not None
        echoes.append(_Echo(text, [ids[0]] if scored else []))
    return _Asked(service, body, requests, echoes, count, params is not None)


async def _whole(asked: _Asked, answers: Answers) -> dict[str, Any]:
    """Return all answers as one object."""
    service, choices = asked.service, list[dict[str, Any]]()
    for number in range(len(asked.requests)):
        text, reason, found = "", "length", list[TokenLogprobs]()
        if asked.generates:
            async for piece in answers.all[number]:
                match piece:
                    case Text(more, logprobs):
                        text += more
                        found += logprobs or ()
                    case End(ended, _):
                        reason = ended
        choices.append(asked.choice(number, text, found, first=True, reason=reason))
    figures = timings(service.model, answers.first.reply) if asked.generates else None
    return head(service, "cmpl", "text_completion") | {
        "choices": choices,
        "usage": usage(asked.requests, asked.count),
        **({"timings": figures} if figures else {}),
    }


async def _events(asked: _Asked, answers: Answers, *, with_usage: bool) -> AsyncGenerator[bytes]:
    """Yield the chunks of a stream."""
    service = asked.service
    base = head(service, "cmpl", "text_completion") | ({"usage": None} if with_usage else {})
    offsets = dict[int, int]()  # characters so far, of choices that have begun
    for number in () if asked.generates else range(len(asked.requests)):
        choice = asked.choice(number, "", first=True, reason="length")
        yield event(base | {"choices": [choice]})
    async for number, piece in merged(answers.all):
        choice = _piece(asked, number, piece, offsets)
        chunk: dict[str, Any] = base | {"choices": [choice]}
        if choice["finish_reason"] is not None or asked.body.timings_per_token:
            chunk["timings"] = timings(service.model, answers.all[number].reply)
        yield event(chunk)
    if with_usage:
        yield event(base | {"choices": [], "usage": usage(asked.requests, asked.count)})
    yield DONE


def _piece(asked: _Asked, number: int, piece: Event, offsets: dict[int, int]) -> dict[str, Any]:
    text = piece.text if isinstance(piece, Text) else ""
    found = list(piece.logprobs or ()) if isinstance(piece, Text) else None
    reason = piece.reason if isinstance(piece, End) else None
    offset = offsets.get(number, 0)
    choice = asked.choice(
        number, text, found, first=number not in offsets, offset=offset, reason=reason
    )
    if choice["logprobs"] is not None:
        offset += sum(map(len, choice["logprobs"]["tokens"]))
    offsets[number] = offset
    return choice


ROUTES = (Route("/v1/completions", completions, methods=["POST"]),)
