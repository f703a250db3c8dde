"""Route of completions, which can also return log probabilities of the prompts' tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.apps.answers.openai.completion import Asked, CompletionBody
from stem_edge.apps.serving.http import read, respond, until_left
from stem_edge.apps.serving.reply import TOKEN_NBYTES
from stem_edge.apps.serving.service import Service, service_of
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling import TokenLogprobs, token_logprobs


async def completions(request: Request) -> Response:
    """Continue prompts, or return the log probabilities of the prompts' tokens, or both."""
    service = service_of(request)
    body = await read(request, CompletionBody)
    service.compute.check(len(body.prompts()) * body.count)
    model, texts = service.model, service.token_texts
    asked = await service.run(lambda: body.asked(model, texts), service.prompts)
    if body.echo and body.logprobs is not None:
        await until_left(request, _score(service, asked, request.scope["hold"]))
    requests = asked.requests if asked.generates else []
    replies = service.compute.submit(requests, request.scope["hold"])
    return await respond(request, service, asked, replies)


async def _score(service: Service, asked: Asked, hold: Callable[[int], None]) -> None:
    """Compute the log probabilities of the prompts' tokens, and append them to `asked.echoes`."""
    tokens = sum(each.prompt_tokens for each in asked.requests)
    hold(tokens * (1 + (asked.body.logprobs or 0)) * TOKEN_NBYTES)
    pairs = zip(asked.echoes, asked.requests[:: asked.body.count], strict=True)
    scored = [
        service.model.request(
            request.prompt[:-1], score=partial(_add, asked, found, request.prompt)
        )
        for (_, found), request in pairs
        if request.prompt_tokens > 1
    ]
    with closing(service.compute.submit(scored, hold)) as replies:
        await replies.whole()


def _add(
    asked: Asked, found: list[TokenLogprobs | int], prompt: Sequence[int], logits: F32
) -> None:
    """For each row of logits [n, V], append the next prompt token's log probability to `found`."""
    rows = zip(logits, prompt[len(found) :], strict=False)
    found.extend([token_logprobs(row, token, asked.body.logprobs or 0) for row, token in rows])


ROUTES = (Route("/v1/completions", completions, methods=["POST"]),)
