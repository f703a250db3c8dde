"""Render conversations with the chat template of a tokenizer, as the model saw them in training.

The template comes with the bundle and cannot be trusted, so it runs in a process of its own
(stem_edge/text/chat_worker.py) with limits on time and memory. That process stays for the next
rendering. It is ended when the template is closed or garbage-collected, or does not answer in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Never, Self, cast

import msgspec

from stem_edge.errors import BackendError, BundleError, InputError
from stem_edge.files.plain_files import damaged, read_plain
from stem_edge.files.strict_json import one_line
from stem_edge.system.child import module_command
from stem_edge.text_table import printable

MAX_CONFIG_NBYTES = 4 << 20
MAX_TEMPLATE_NBYTES = 64 << 10
MAX_MESSAGES = 4096
MAX_MESSAGE_CHARS = 1 << 19  # of all messages together
MAX_ANSWER_NBYTES = 16 << 20
SECONDS = 2.0  # of a rendering
LOAD_FACTOR = 4  # times SECONDS for the first rendering, which compiles
START_SECONDS = 60.0  # long, because Jinja may be imported from a slow card
ROLES = ("system", "developer", "user", "assistant", "tool")
SAMPLE = [{"role": "user", "content": "Hello"}]
REMEDY = "export with a tokenizer whose chat_template works, or give plain text"


def checked_messages(messages: object) -> list[dict[str, str]]:
    """Check and copy messages, each a role and a text. Raises InputError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InputError(f"messages is of type {type(messages).__name__}, expected a list")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InputError(f"there are {len(messages)} messages, expected 1 to {MAX_MESSAGES}")
    for number, message in enumerate(messages):
        _check_message(f"messages[{number}]", message)
    count = sum(len(message["content"]) for message in messages)
    if count > MAX_MESSAGE_CHARS:
        raise InputError(
            f"the messages have {count:,} characters, expected at most {MAX_MESSAGE_CHARS:,}; "
            "shorten them"
        )
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise InputError(
            f'{where} is not of the form {{"role": "user", "content": "text"}}; give both keys'
        )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise InputError(
            f"{where}.role is {printable(ascii(role)[:80])}, expected one of: {', '.join(ROLES)}"
        )
    if not isinstance(content, str):
        raise InputError(f"{where}.content is of type {type(content).__name__}, expected a text")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # such as bytes of a terminal that are not UTF-8
        raise InputError(
            f"{where}.content is not valid Unicode ({error}); give it as UTF-8"
        ) from None


def has_template(path: Path) -> bool:
    """Return whether a tokenizer_config.json has a chat template. Raises BundleError."""
    return isinstance(_read_config(path).get("chat_template"), str)


def _read_config(path: Path) -> dict[str, Any]:
    data = read_plain(path, MAX_CONFIG_NBYTES, "tokenizer configuration")
    try:
        if len(data) > MAX_CONFIG_NBYTES:
            raise ValueError(f"larger than {MAX_CONFIG_NBYTES:,} bytes")
        return msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # errors of msgspec are ValueErrors
        raise damaged(path, f"not a JSON object ({one_line(error)})") from None


def read_template(path: Path) -> tuple[str, dict[str, str]]:
    """Read the chat template of a tokenizer_config.json, and the special tokens that it may use.

    Raises BundleError, and InputError if there is no template.
    """
    config = _read_config(path)
    template = config.get("chat_template")
    if not isinstance(template, str):
        raise InputError(
            f"{path}: no chat template; give a plain prompt, or export with a tokenizer that has a "
            "template"
        )
    if len(template.encode()) > MAX_TEMPLATE_NBYTES:
        raise BundleError(
            f"{path}: chat_template has {len(template.encode()):,} bytes, expected at most "
            f"{MAX_TEMPLATE_NBYTES:,}; {REMEDY}"
        )
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
    return template, {name: token for name, token in tokens.items() if isinstance(token, str)}


class ChatTemplate:
    """Chat template of a tokenizer_config.json; close it, or use it as a context manager.

    Raises BundleError for a template that cannot work, naming the line; InputError if there is
    none; BackendError if its process cannot be started.
    """

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._path, self._seconds = path, seconds
        self.source, self.tokens = read_template(path)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        try:
            # More time, because compiling takes longer than rendering, above all on a small device.
            self._render(SAMPLE, True, LOAD_FACTOR * seconds)
        except InputError:  # no fault of the template: it may accept only other messages
            pass
        except BaseException:
            self.close()
            raise

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation, by default with the beginning of an answer at its end.

        Raises InputError for malformed messages and for those that the template refuses,
        BundleError for a template that fails or takes too long.
        """
        return self._render(checked_messages(messages), add_generation_prompt, self._seconds)

    def _render(self, messages: list[dict[str, str]], prompt: bool, seconds: float) -> str:
        request = {
            "template": self.source,
            "tokens": self.tokens,
            "messages": messages,
            "add_generation_prompt": prompt,
        }
        answer = self._ask(json.dumps(request).encode() + b"\n", seconds)
        if "refused" in answer:
            raise InputError(
                f"{self._path}: the chat template refuses these messages: "
                f"{printable(' '.join(str(answer['refused']).split()))}; give others"
            )
        if "text" not in answer:
            self._fail(str(answer.get("error")), answer.get("line"))
        return str(answer["text"])

    def _ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        with self._lock:
            worker = self._worker or self._start()
            self._worker = None  # must not be asked again unless it answers
            try:
                answer = msgspec.json.decode(worker.ask(request, seconds), type=dict[str, Any])
                self._worker = worker
            except TimeoutError:
                self._fail(f"it takes longer than {seconds} seconds")
            except (OSError, msgspec.MsgspecError):
                self._fail("its process ended")
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

    def _fail(self, reason: str, line: object = None) -> Never:
        where = f"chat_template, line {line}" if isinstance(line, int) else "chat_template"
        reason = printable(" ".join(reason.split()))
        raise BundleError(f"{self._path}: {where}: the chat template fails: {reason}; {REMEDY}")

    def close(self) -> None:
        """End the process. Closing twice is fine, and a later rendering starts a new one."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """Process that renders templates, killed when it does not answer in time."""

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
        """Send a line and return the answer, a line. Raises TimeoutError and other OSErrors."""
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
