"""Texts to tokens and back, and conversations to prompts, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.answers.refusals import RefusalError
from stem_edge.runtime.model import Model
from stem_edge.serving.http import json_response, read, until_left
from stem_edge.serving.service import service_of

MOST_TOKENS = 100_000  # more than a text of MOST_NBYTES has; a body has some 130,000 values at most
MOST_PIECES = 1 << 16  # of which each is told
MOST_NBYTES = 96 << 10  # of a text, since tokenizing takes up to 400 bytes of memory for each


class Tokenize(msgspec.Struct):
    """The body of `tokenize`. parse_special: read the names of special tokens as these tokens."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(msgspec.Struct):
    """The body of `detokenize`."""

    tokens: Annotated[list[int], msgspec.Meta(max_length=MOST_TOKENS)]


class ApplyTemplate(msgspec.Struct):
    """The body of `apply-template`, as that of chat completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


async def tokenize(request: Request) -> Response:
    """Return the ids of a text's tokens, and their pieces of text if asked for."""
    body, model = await read(request, Tokenize), service_of(request).model
    nbytes = len(body.content.encode(errors="surrogatepass"))
    if nbytes > MOST_NBYTES:
        raise RefusalError(
            f"content has {nbytes:,} bytes; expected at most {MOST_NBYTES:,}; send it in parts",
            "content",
        )
    return await _told(request, lambda: _tokenized(model, body))


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with the names of special tokens."""
    body, model = await read(request, Detokenize), service_of(request).model

    def text() -> str:
        return model.detokenize(body.tokens, skip_special_tokens=False)

    return await _told(request, lambda: json_response({"content": text()}))


async def apply_template(request: Request) -> Response:
    """Return the prompt that a conversation becomes."""
    body, model = await read(request, ApplyTemplate), service_of(request).model

    def text() -> str:
        if not model.has_chat_template:
            raise RefusalError("this model has no chat template")
        return model.chat_prompt(
            body.messages,
            body.add_generation_prompt,
            tools=body.tools,
            template_arguments=body.chat_template_kwargs,
        )

    return await _told(request, lambda: json_response({"prompt": text()}))


async def _told(request: Request, made: Callable[[], Response]) -> Response:
    """Make a response in a thread, because large ones take long; for a client that waits."""
    service = service_of(request)
    return await until_left(request, service.texts.run(made))


def _tokenized(model: Model, body: Tokenize) -> Response:
    ids = model.tokenize(
        body.content,
        add_special_tokens=body.add_special,
        special_tokens_in_text=body.parse_special,
    )
    if not body.with_pieces:
        return json_response({"tokens": ids})
    if len(ids) > MOST_PIECES:
        raise RefusalError(
            f"content has {len(ids):,} tokens; at most {MOST_PIECES:,} have pieces; send it in parts, or "
            "leave out with_pieces",
            "with_pieces",
        )
    # Of each token once, because a text may be the same token over and over.
    pieces = {token: _piece(token, model.token_bytes(token)) for token in set(ids)}
    told = b",".join([pieces[token] for token in ids])
    return Response(b'{"tokens":[%b]}' % told, media_type="application/json")


def _piece(token: int, data: bytes) -> bytes:
    """Return a token as JSON: with its text, or with its bytes if they are part of a character."""
    piece: str | list[int]
    try:
        piece = data.decode()
    except UnicodeDecodeError:
        piece = list(data)
    return msgspec.json.encode({"id": token, "piece": piece})


ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
)
