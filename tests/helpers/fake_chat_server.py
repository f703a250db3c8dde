"""Serve the chat page and answers that a test wrote, with figures, on loopback."""

from __future__ import annotations

import json
import mimetypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import stem_edge

PAGE = Path(stem_edge.__file__).parent / "apps" / "serving" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class FakeChat:
    """What the server answers, which a test may change at any time, and what it was asked.

    answers: texts, one for each request; the last is given again and again. delay: seconds before
    each word. key: what requests must bear. below: path that the page is mounted at, ends in "/".
    """

    answers: list[str] = field(default_factory=lambda: ["Hello *there*."])
    thoughts: str = ""  # before each answer
    delay: float = 0.0
    loading: bool = False
    has_template: bool = True
    key: str | None = None
    breaks: bool = False  # the stream ends in the midst of an answer
    finish: str = "stop"
    below: str = "/"
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cancelled: int = 0

    def next_answer(self) -> str:
        """Text of the next answer."""
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def serving(chat: FakeChat, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """Serve `chat` at 127.0.0.1 until the block ends; chat.url says where."""
    handler = type("Handler", (_Handler,), {"chat": chat})
    server = _Server(("127.0.0.1", port), handler)
    chat.url = f"http://127.0.0.1:{server.server_port}{chat.below}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def timings(prompt: int, predicted: int) -> dict[str, float]:
    """Figures after some tokens of an answer, of a model whose rows are on flash."""
    tokens = prompt + predicted
    return {
        "prompt_n": prompt,
        "cache_n": 5,
        "prompt_ms": prompt * 8.0,
        "prompt_per_second": 125.0,
        "predicted_n": predicted,
        "predicted_ms": predicted * 40.0,
        "predicted_per_second": 25.0 - 40 / (predicted + 9),
        "row_hits": tokens * 9,
        "row_misses": tokens,
        "flash_bytes": tokens * 49_152,
        "memory_bytes": 412_000_000 + 1_500_000 * min(predicted, 60),
        "memory_limit": 600_000_000,
    }


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a browser that finds no place tries again after seconds
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    chat: FakeChat

    def do_GET(self) -> None:
        path = self.path.removeprefix(self.chat.below)
        if path == "health":
            self._health()
        elif path == "props":
            if self._may():
                self._json(200, self._props())
        else:
            self._file(path or "index.html")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        self.chat.asked.append(body)
        self.chat.paths.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(self.chat.next_answer(), chat="messages" in body)
        except (BrokenPipeError, ConnectionResetError):
            self.chat.cancelled += 1

    def _stream(self, text: str, *, chat: bool) -> None:
        words = text.split(" ")
        words = [word + " " for word in words[:-1]] + words[-1:]
        if chat:
            first = {"role": "assistant", "content": None}
            for delta in (first, {"reasoning_content": self.chat.thoughts}):
                self._event({"choices": [{"index": 0, "delta": delta}]})
        for at, word in enumerate(words):
            time.sleep(self.chat.delay)
            said = {"delta": {"content": word}} if chat else {"text": word}
            chunk = {"choices": [{"index": 0, "finish_reason": None, **said}]}
            self._event(chunk | {"timings": timings(20, at + 1)})
            if self.chat.breaks and at >= len(words) // 2:
                return
        last = {"index": 0, "finish_reason": self.chat.finish, "delta": {}, "text": ""}
        self._event({"choices": [last], "timings": timings(20, len(words))})
        self.wfile.write(b": comment\n\ndata: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _health(self) -> None:
        if self.chat.loading:
            self._json(503, {"error": {"message": "loading", "type": "unavailable_error"}})
        else:
            self._json(200, {"status": "ok"})

    def _props(self) -> dict[str, Any]:
        return {
            "model": "demo-1b-stem",
            "context_length": 4096,
            "has_chat_template": self.chat.has_template,
            "tools": False,
            "engine": "onnxruntime",
            "memory_limit": 600_000_000,
            "build_info": "stem-edge test",
            "slots": 4,
            "sampling": {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0},
        }

    def _may(self) -> bool:
        if self.chat.key in (None, (self.headers["Authorization"] or "").removeprefix("Bearer ")):
            return True
        error = {"message": "This key is wrong or missing.", "type": "authentication_error"}
        self._json(401, {"error": error})
        return False

    def _file(self, path: str) -> None:
        file = PAGE / path
        if ".." in path or not file.is_file():
            self._json(404, {"error": {"message": f"{path} is not here"}})
            return
        kind = "text/javascript" if file.suffix == ".mjs" else mimetypes.guess_type(path)[0]
        self._send(200, kind or "text/plain", file.read_bytes())

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the tests read what was asked."""
