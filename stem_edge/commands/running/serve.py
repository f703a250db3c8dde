"""The command `stem-edge serve`: a server with OpenAI's interface and a chat page."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette

from stem_edge.apps.serving import app
from stem_edge.apps.serving.compute import END_SECONDS, REQUESTS_NBYTES, Compute
from stem_edge.apps.serving.connections import Server, log_to_stderr
from stem_edge.bundle.hub.fetch import pinned
from stem_edge.commands.options.arguments import read_text
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.errors import InputError
from stem_edge.progress import show_status, tell
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with, open_or_make

SEQUENCES = 8  # answers computed together, if memory allows
GRACE_SECONDS = 30  # to finish answers at the end
MAX_KEY_CHARS, MAX_PORT = 4096, 65535

DESCRIPTION = """\
Serve OpenAI's interface, and a chat page, on this machine. Ctrl-C or SIGTERM
ends it; answers under way are finished first. Up to 8 answers are computed
together."""

EPILOG = """\
examples:
  stem-edge serve model --memory 600MB --context-length 4096
  stem-edge serve model --host 0.0.0.0 --api-key-file key.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    host = "address to listen on (default: 127.0.0.1)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    add("--port", type=int, default=8080, metavar="N", help="port; 0: any free (default: 8080)")
    key = "file with the key that clients must give"
    add("--api-key-file", type=Path, metavar="FILE", help=key)
    allow = "host name by which clients may ask; repeatable; *: any"
    add("--allow-host", **several, metavar="NAME", help=allow)
    origin = "let pages of this origin ask; repeatable; *: any"
    add("--cors-origin", dest="origins", **several, metavar="ORIGIN", help=origin)
    add_loading(parser.add_argument_group("loading"))
    parser.set_defaults(sequences=None)


def run(args: argparse.Namespace) -> int:
    key = None if args.api_key_file is None else _key(args.api_key_file)
    options, bundle = loading_options(args), pinned(args.bundle)
    options["sequences"] = 1 if args.sequences is None else args.sequences
    planned = LoadOptions(**options, requests=REQUESTS_NBYTES)
    open_or_make(bundle, planned)  # before anything listens
    with listen(args.host, args.port) as listening:
        program = app(
            lambda: load_with(bundle, planned),
            sequences=args.sequences or SEQUENCES,
            api_key=key,
            hosts=args.allow_host,
            origins=args.origins,
        )
        url = url_of(listening)
        told = partial(announce, listening, url, has_key=bool(key), has_names=bool(args.allow_host))
        log_to_stderr()
        server = _Server(program, url, told)
        server.run(sockets=[listening])
        show_status("")
    if server.compute.failure is not None:
        raise server.compute.failure
    return 0


def _key(path: Path) -> str:
    key = read_text(path, "key", MAX_KEY_CHARS).strip()
    if not key or not key.isprintable() or not key.isascii():
        raise InputError(
            f"--api-key-file {path} has no key; give one line of printable ASCII characters"
        )
    return key


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises InputError if the address or port is unavailable."""
    if not 0 <= port <= MAX_PORT:
        raise InputError(f"port is {port}; expected 0 to {MAX_PORT}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0]
        raise InputError(
            f"cannot listen on port {port} of {host} ({reason}); choose others with --host and --port"
        ) from None


def url_of(listening: socket.socket) -> str:
    """Return the URL of the server for a browser on this machine, like http://127.0.0.1:8080."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:  # all addresses; a client cannot connect to this one
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(listening: socket.socket, url: str, *, has_key: bool, has_names: bool) -> None:
    """Print the address; if other machines can reach it, also notes on API key and host names."""
    tell(f"listening at {url}, loading the model")
    if ip_address(listening.getsockname()[0]).is_loopback:
        return
    if not has_key:
        tell("note: whoever reaches this machine can use the model; --api-key-file changes that")
    if not has_names:
        by_name = f"by name with --allow-host {socket.gethostname()}"
        tell(f"note: others can ask by an address of this machine; {by_name}")


class _Server(Server):
    """Server that prints when the model is loaded, and lets answers finish before it ends.

    After the first signal, new requests are refused, and answers may go on for half a minute before they get
    an error. The second signal sends these errors at once. The third, or a signal while the model loads, exits.
    """

    def __init__(self, program: Starlette, url: str, announce: Callable[[], None]) -> None:
        super().__init__(program)
        self.compute: Compute = program.state.service.compute
        self._announce, self._deadline, self._url = announce, float("inf"), url
        self._began, self._loading = time.monotonic(), True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._deadline or self._loading:
            os._exit(128 + sig)  # other ways to exit wait for the loading thread, or print tasks
        elif self.compute.draining:
            self._deadline = now
        else:
            self.compute.draining = True
            self._deadline = now + GRACE_SECONDS
            if self.compute.busy:
                tell(f"finishing answers for at most {GRACE_SECONDS} s; once more to end now")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._announce()  # now, because signals are handled from here on
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must end. uvicorn calls this ten times a second."""
        compute, now = self.compute, time.monotonic()
        if self._loading:
            self._show_loading(now - self._began)
        drained = compute.draining and not compute.busy
        if drained or now >= self._deadline or compute.failure is not None:
            await to_thread.run_sync(compute.end, END_SECONDS)
            self.should_exit = True
        return await super().on_tick(counter)

    def _show_loading(self, seconds: float) -> None:
        model = self.compute.loaded
        if model is None:
            show_status(f"loading for {seconds:.0f} s")
            return
        self._loading = False
        show_status("")
        tell(f"loaded after {seconds:.1f} s")
        if not model.has_chat_template:
            tell("note: the model has no chat template; it continues messages as any text")
        print(f"{self._url}/ has the chat page, {self._url}/v1 answers programs", flush=True)
