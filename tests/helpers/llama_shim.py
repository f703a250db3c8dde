"""Stands in for llama-server where its own tests start it; a program.

Flags are read as llama-server reads them; those about models, memory and speed are ignored, and one
small bundle (in the environment: STEM_EDGE_LLAMA_BUNDLE) is served whatever model is asked for. What only
llama-server has is here, so that the server need not have it: paths without /v1, the form of
/completions, defaults for tokens, temperature and seed, the type of an error about the context, and
that a picture is an error of the server.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from changing import seal
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import stem_edge
from stem_edge.serving import app

BUNDLE = "STEM_EDGE_LLAMA_BUNDLE"
NATIVE = ("/completion", "/completions")
PATHS = {path: f"/v1{path}" for path in ("/chat/completions", "/models")}
PATHS |= dict.fromkeys(NATIVE, "/v1/completions")
TOO_LONG = re.compile(r"has ([\d,]+) tokens.* holds (?:at most )?([\d,]+)")
NO_IMAGES = "image input is not supported"


def flags(given: Sequence[str]) -> argparse.Namespace:
    """Read the flags that matter."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--alias", default="model")
    parser.add_argument("--api-key")
    parser.add_argument("--cors-origins", default="")
    parser.add_argument("--ctx-size", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--n-predict", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--reasoning", default="auto")
    return parser.parse_known_args(given)[0]


def bundle_with(template: Path | None, folder: Path) -> Path:
    """Return the bundle, or a copy of it with another chat template."""
    bundle = Path(os.environ[BUNDLE])
    if template is None:
        return bundle
    shutil.copytree(bundle, folder / "bundle")
    told = json.loads((bundle / "tokenizer_config.json").read_bytes())
    told["chat_template"] = template.read_text("utf-8")
    return seal(folder / "bundle", {"tokenizer_config.json": json.dumps(told).encode()})


class Shim:
    """The server with llama-server's paths and forms."""

    def __init__(self, server: ASGIApp, given: argparse.Namespace) -> None:
        self._server, self._given = server, given

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._server(scope, receive, send)
            return
        asked: str = scope["path"]
        path = PATHS.get(asked, asked)
        if scope["method"] == "POST":
            body = await _read(receive)
            body = json.dumps(self._with_defaults(path, json.loads(body))).encode()
            headers = [(n, v) for n, v in scope["headers"] if n != b"content-length"]
            headers.append((b"content-length", b"%d" % len(body)))
            scope = {**scope, "headers": headers}
            receive = _first(body, receive)
        native = asked in NATIVE
        await self._server({**scope, "path": path}, receive, Translated(send, native=native))

    def _with_defaults(self, path: str, body: Any) -> Any:
        if not isinstance(body, dict) or path in ("/tokenize", "/detokenize"):
            return body
        if path == "/apply-template":
            return {"chat_template_kwargs": self._variables()} | body
        defaults = {"temperature": self._given.temp, "seed": self._given.seed}
        if "n_predict" not in body:
            defaults["max_tokens"] = self._given.n_predict
        if "n_predict" in body:
            body["max_tokens"] = body.pop("n_predict")
        return defaults | body

    def _variables(self) -> dict[str, Any]:
        """Return what llama-server tells every template."""
        today = datetime.date.today().strftime("%d %b %Y")
        return {"enable_thinking": self._given.reasoning != "off", "date_string": today}


class Translated:
    """Sends a response on, in llama-server's form where that differs; streams go as they are."""

    def __init__(self, send: Send, *, native: bool) -> None:
        self._send, self._native = send, native
        self._start: Message | None = None  # of a response that is translated as a whole
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Take a message of the server."""
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            if kinds == [b"application/json"] and (self._native or message["status"] >= 400):
                self._start = message
                return
            # The tests look for names of headers as llama-server writes them.
            message["headers"] = [(name.title(), value) for name, value in message["headers"]]
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_whole(self._start)

    async def _send_whole(self, start: Message) -> None:
        status, told = start["status"], json.loads(self._body)
        if status < 400:
            told = {"content": told["choices"][0]["text"], **told}
        elif (found := TOO_LONG.search(told["error"]["message"])) is not None:
            tokens, held = (int(number.replace(",", "")) for number in found.groups())
            kind = {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": held}
            told["error"] |= kind
        elif NO_IMAGES in told["error"]["message"]:
            status = 500
        body = json.dumps(told).encode()
        headers = [(n, v) for n, v in start["headers"] if n != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _first(body: bytes, receive: Receive) -> Receive:
    """Return `receive` with a body before all else."""
    bodies = [body]

    async def received() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await receive()

    return received


def main() -> None:
    """Serve until a signal comes."""
    given = flags(sys.argv[1:])
    with TemporaryDirectory() as folder:
        bundle = bundle_with(given.chat_template_file, Path(folder))
        length = given.ctx_size // given.parallel
        with stem_edge.load(bundle, context_length=length, sequences=given.parallel) as model:
            served = app(
                model,
                name=given.alias,
                api_key=given.api_key,
                sequences=given.parallel,
                origins=given.cors_origins.split(",") if given.cors_origins else (),
            )
            # Their client looks for names of headers as h11 writes them: Access-Control-Allow-Origin.
            options: dict[str, Any] = {"http": "h11", "log_level": "warning"}
            uvicorn.run(Shim(served, given), host=given.host, port=given.port, **options)


if __name__ == "__main__":
    main()
