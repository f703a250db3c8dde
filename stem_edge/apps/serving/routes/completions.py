"""Completions of texts, and log probabilities of given ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.answers.events import AnswerEvent, End
from stem_edge.apps.answers.openai.completion import Asked, CompletionBody, prepare
from stem_edge.apps.answers.openai.options import DONE, head, usage
from stem_edge.apps.serving.http import COMMENT, event, read, respond, until_left
from stem_edge.apps.serving.reply import Replies
from stem_edge.apps.serving.service import Service, service_of
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling import TokenLogprobs, token_logprobs


async def completions(request: Request) -> Response:
    """Continue prompts, or give the log probabilities of given ones, or both."""
    service = service_of(request)
    body = await read(request, CompletionBody)
    with_usage = body.with_usage
    asked = await service.prompts.run(lambda: _prepare(service, body))
    if body.echo and body.logprobs is not None:
        await until_left(request, _score(service, asked))
    replies = service.compute.submit(asked.requests if asked.generates else [])
    if not body.stream:
        return await respond(request, replies, _whole(service, asked, replies))
    return await respond(request, replies, _events(service, asked, replies, with_usage=with_usage))


async def _score(service: Service, asked: Asked) -> None:
    """Compute the log probabilities of the prompts."""
    pairs = zip(asked.echoes, asked.requests[:: asked.count], strict=True)
    scored = [
        service.model.request(
            request.prompt[:-1], score=partial(_add, asked, found, request.prompt)
        )
        for (_, found), request in pairs
        if request.prompt_tokens > 1
    ]
    with closing(service.compute.submit(scored)) as replies:
        await replies.whole()


def _add(
    asked: Asked, found: list[TokenLogprobs | int], prompt: Sequence[int], logits: F32
) -> None:
    """Append log probabilities of the prompt's next tokens; `found` begins with its first token."""
    rows = zip(logits, prompt[len(found) :], strict=False)
    found.extend([token_logprobs(row, token, asked.body.logprobs or 0) for row, token in rows])


def _prepare(service: Service, body: CompletionBody) -> Asked:
    """Tokenize prompts that are not too many. Raises InputError, and what Compute.check raises."""
    params, prompts = body.sampling(service.model), body.prompts()
    answers = len(prompts) * body.count
    service.compute.check(answers)
    return prepare(service.model, service.token_texts, body, prompts, params)


async def _whole(service: Service, asked: Asked, replies: Replies) -> dict[str, Any]:
    """Return all answers as one object."""
    found = await replies.whole()
    figures = {"timings": service.timings(replies[0])} if found else {}
    # In a thread: thousands of tokens' texts, if log probabilities are asked for.
    body = await service.answers.run(lambda: asked.completion(service.name, found))
    return body | figures


async def _events(
    service: Service, asked: Asked, replies: Replies, *, with_usage: bool
) -> AsyncGenerator[bytes]:
    """Yield the chunks of a stream."""
    base = head(service.name, "cmpl", "text_completion") | ({"usage": None} if with_usage else {})
    offsets = dict[int, int]()  # characters so far, of choices that have begun
    for number in () if asked.generates else range(len(asked.requests)):
        choice = await _choice(service, asked, number, End("length"), offsets)
        yield event(base | {"choices": [choice]})
    async for found in replies.events():
        if found is None:
            yield COMMENT
            continue
        choice = await _choice(service, asked, *found, offsets)
        chunk: dict[str, Any] = base | {"choices": [choice]}
        if choice["finish_reason"] is not None or asked.body.timings_per_token:
            chunk["timings"] = service.timings(replies[found[0]])
        yield event(chunk)
    if with_usage:
        yield event(base | {"choices": [], "usage": usage(asked.requests, asked.count)})
    yield DONE


async def _choice(
    service: Service, asked: Asked, number: int, piece: AnswerEvent, offsets: dict[int, int]
) -> dict[str, Any]:
    """Return the choice of a chunk; in a thread if it has the texts of many tokens."""
    if asked.body.logprobs is None:
        return asked.choice(number, piece, offsets)
    return await service.answers.run(lambda: asked.choice(number, piece, offsets))


ROUTES = (Route("/v1/completions", completions, methods=["POST"]),)
