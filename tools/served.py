"""Starts `stem-edge serve` for another tool."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
SECONDS = 120.0  # to start


@contextmanager
def served(
    bundle: Path, *options: str, files: int = 1024, log: IO[bytes] | None = None
) -> Iterator[tuple[int, int]]:
    """Run stem-edge serve with a limit on open files; yield (port, process id) when it is ready."""
    with socket.create_server((HOST, 0)) as free:
        port = int(free.getsockname()[1])
    serve = f'ulimit -n {files}; exec "$0" -m stem_edge serve "$@" --port {port}'
    command = ["sh", "-c", serve, sys.executable, str(bundle), *options]
    server = subprocess.Popen(command, stdout=log or subprocess.DEVNULL, stderr=log)
    try:
        deadline = time.monotonic() + SECONDS
        while server.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/health"):
                break  # any other status than 200 is an OSError
            time.sleep(0.1)
        else:
            raise SystemExit("the server does not start")
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(SECONDS)
