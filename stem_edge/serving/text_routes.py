"""Texts to tokens and back, and conversations to prompts, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stem_edge.runtime.model import Model
from stem_edge.serving.http import json_response, read
from stem_edge.serving.refusals import RefusalError
from stem_edge.serving.service import service_of

MOST_TOKENS = 1 << 20  # and characters, which is more than a context has


class Tokenize(msgspec.Struct):
    """The body of `tokenize`. parse_special: read the names of special tokens as these tokens."""

    content: Annotated[str, msgspec.Meta(max_length=MOST_TOKENS)]
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
    return await _told(lambda: {"tokens": _tokenized(model, body)})


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with the names of special tokens."""
    body, model = await read(request, Detokenize), service_of(request).model

    return await _told(
        lambda: {"content": model.detokenize(body.tokens, skip_special_tokens=False)}
    )


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

    return await _told(lambda: {"prompt": text()})


async def _told(made: Callable[[], object]) -> Response:
    """Make an answer and its JSON in a thread, because large ones take long."""
    return await to_thread.run_sync(lambda: json_response(made()))


def _tokenized(model: Model, body: Tokenize) -> Sequence[int | dict[str, Any]]:
    ids = model.tokenize(
        body.content,
        add_special_tokens=body.add_special,
        special_tokens_in_text=body.parse_special,
    )
    if not body.with_pieces:
        return ids
    return [{"id": token, "piece": _piece(model.token_bytes(token))} for token in ids]


def _piece(data: bytes) -> str | list[int]:
    """Return the text of bytes, or the bytes if they are part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
)
