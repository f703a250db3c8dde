"""Renders conversations with a tokenizer's chat template.

The template comes with the bundle and cannot be trusted, so it runs in a separate process
(stem_edge/text/chat_worker.py) with limits on time and memory. That process stays for the next
rendering. It ends when the template is closed or garbage-collected, or does not answer in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.files.plain_files import damaged, decode_json, read_plain
from stem_edge.shown import printable
from stem_edge.system.child import module_command

MAX_CONFIG_NBYTES = 4 << 20
MAX_TEMPLATE_NBYTES = 64 << 10
MAX_ANSWER_NBYTES = 16 << 20
SECONDS = 2.0  # of a rendering
LOAD_FACTOR = 4  # times SECONDS for the first rendering, which compiles
START_SECONDS = 60.0  # long, because Jinja may be imported from a slow card
TOOL_USE = "tool_use"  # name of the template that transformers takes when tools are given
SAMPLE = [{"role": "user", "content": "Hello"}]
REMEDY = "export with a tokenizer whose chat_template works, or give plain text"


def has_template(path: Path) -> bool:
    """Return True if a tokenizer_config.json has a chat template. Raises BundleError."""
    return bool(_templates(_read_config(path)))


def _read_config(path: Path) -> dict[str, Any]:
    data = read_plain(path, MAX_CONFIG_NBYTES, "tokenizer configuration")
    try:
        return decode_json(data, dict[str, Any], MAX_CONFIG_NBYTES)
    except ValueError as error:
        raise damaged(path, f"not a JSON object ({error})") from None


def _templates(config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name; {} if there is no default template."""
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    named = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    pairs = [(each.get("name"), each.get("template")) for each in named]
    found = {n: t for n, t in pairs if isinstance(n, str) and isinstance(t, str)}
    return found if "default" in found else {}


def read_template(path: Path) -> tuple[str, str, dict[str, str]]:
    """Return (chat template, template for tools, special tokens) of a tokenizer_config.json.

    Raises BundleError, and InputError if there is no template.
    """
    config = _read_config(path)
    templates = _templates(config)
    if not templates:
        raise InputError(
            f"{path}: no chat template; give a plain prompt, or export with a tokenizer that has a "
            "template"
        )
    usual = templates["default"]
    both = usual, templates.get(TOOL_USE, usual)
    if (nbytes := max(len(template.encode()) for template in both)) > MAX_TEMPLATE_NBYTES:
        raise BundleError(
            f"{path}: chat_template has {nbytes:,} bytes, expected at most {MAX_TEMPLATE_NBYTES:,}; "
            f"{REMEDY}"
        )
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
    return *both, {name: token for name, token in tokens.items() if isinstance(token, str)}


class ChatTemplate:
    """The chat template of a tokenizer_config.json. Call `close` after use.

    Raises BundleError with the line number for a template that cannot work, InputError if there is no
    template, and BackendError if its process cannot be started.
    """

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._path, self._seconds = path, seconds
        self.source, self.tool_source, self.tokens = read_template(path)
        self._lock = threading.RLock()  # re-entrant, for a signal handler
        self._worker: _Worker | None = None
        self._works = False  # True once the sample was rendered: later failures are due to messages
        try:
            # More time, because compiling takes longer than rendering, above all on a small device.
            sample = {"messages": SAMPLE, "add_generation_prompt": True}
            self._render(sample, LOAD_FACTOR * seconds)
            self._works = True
        except InputError:  # no fault of the template: it may accept only other messages
            pass
        except BaseException:
            self.close()
            raise

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, by default followed by the beginning of an answer.

        messages, tools and arguments: results of the functions in stem_edge.text.messages.
        Raises InputError if the template refuses the messages, fails, takes too long or does not support tools.
        Raises BundleError if the process ends, or if the template fails and already failed on a sample at loading.
        """
        source = self.tool_source if tools else self.source
        if tools and not re.search(r"\btools\b", source):
            raise InputError(
                "the chat template of this bundle has no place for tools; give none, or describe "
                "them in a message"
            )
        request: dict[str, Any] = {"template": source, "messages": messages, "tools": tools or None}
        request |= {"arguments": arguments or {}, "add_generation_prompt": add_generation_prompt}
        return self._render(request, self._seconds)

    def _render(self, request: dict[str, Any], seconds: float) -> str:
        request = {"template": self.source, "tokens": self.tokens, **request}
        try:
            answer = self._ask(json.dumps(request).encode() + b"\n", seconds)
        except TimeoutError:
            answer = {"error": f"it takes longer than {seconds} seconds"}
        except (OSError, msgspec.MsgspecError):
            raise self._broken("chat_template", "its process ended") from None
        if "text" in answer:
            return str(answer["text"])
        reason = str(answer.get("refused", answer.get("error")))
        reason = printable(" ".join(reason.split()))
        if "refused" in answer:
            raise InputError(
                f"the chat template of this bundle refuses these messages: {reason}; give others"
            )
        line = answer.get("line")
        where = f"chat_template, line {line}" if isinstance(line, int) else "chat_template"
        if not self._works:
            raise self._broken(where, reason)
        # Without a path, because servers tell it to their clients.
        raise InputError(
            f"{where}: the chat template of this bundle fails for these messages: {reason}; give others"
        )

    def _ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        with self._lock:
            # Removed meanwhile, so that a process that did not answer is not asked again.
            worker, self._worker = self._worker or self._start(), None
            try:
                answer = msgspec.json.decode(worker.ask(request, seconds), type=dict[str, Any])
                self._worker = worker
            finally:
                if self._worker is None:
                    worker.close()
            return answer

    def _start(self) -> _Worker:
        try:
            return _Worker()
        except OSError as error:
            raise BackendError(
                f"{self._path}: cannot start a process for the chat template "
                f"({error.strerror or 'no reason given'}); free some memory and try again"
            ) from error

    def _broken(self, where: str, reason: str) -> BundleError:
        return BundleError(f"{self._path}: {where}: the chat template fails: {reason}; {REMEDY}")

    def close(self) -> None:
        """Stop the rendering process. A later call of `render` starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None


class _Worker:
    """A process that renders templates. It is killed if it does not answer in time."""

    def __init__(self) -> None:
        process = subprocess.Popen(
            module_command("stem_edge.text.chat_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        self.close = weakref.finalize(self, _end, os.getpid(), process)
        try:
            # Wait until it is ready, so that starting it does not count as the time of a request.
            self.ask(b"", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Send one line; return the line of the answer. Raises TimeoutError and other OSErrors."""
        stdin, stdout = (cast(IO[bytes], p) for p in (self._process.stdin, self._process.stdout))
        # A timer kills the process, because otherwise both a write and a read could block for ever.
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._process.kill()

        end = threading.Timer(seconds, expire)
        end.start()
        try:
            stdin.write(request)
            stdin.flush()
            line = stdout.readline(MAX_ANSWER_NBYTES)
        except BrokenPipeError:
            line = b""
        finally:
            end.cancel()
            end.join()
        if late.is_set():
            raise TimeoutError
        if not line.endswith(b"\n"):
            raise BrokenPipeError
        return line


def _end(owner: int, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:  # a fork must not end the process that its parent still uses
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # closing flushes, which cannot work any more
            cast(IO[bytes], pipe).close()
