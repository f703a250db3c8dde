"""A model hub of our own on the loopback interface, which speaks the protocol of huggingface_hub.

It serves files of folders a piece at a time, records requests, and fails on request.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

PIECE_NBYTES = 1 << 16
LFS_FROM = 1000  # bytes; smaller files are blobs of git


@dataclass(frozen=True)
class Blob:
    """Contents of a file."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size."""
        return len(self.data)

    @cached_property
    def sha256(self) -> str | None:
        """Name of a large file; None for a small one."""
        return hashlib.sha256(self.data).hexdigest() if self.nbytes >= LFS_FROM else None

    @cached_property
    def oid(self) -> str:
        """Name in git: for a large file, that of a pointer to it."""
        text = self.data if self.sha256 is None else self.sha256.encode()
        return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()

    def pieces(self, start: int) -> Iterator[bytes]:
        """Yield the contents from a byte on."""
        for at in range(start, self.nbytes, PIECE_NBYTES):
            yield self.data[at : at + PIECE_NBYTES]


@dataclass
class Model:
    """A repository: its commits, and what its branches and tags are."""

    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, Blob], ref: str = "main") -> str:
        """Add a state of all files; return its name."""
        said = json.dumps([len(self.commits), sorted((n, b.oid) for n, b in files.items())])
        sha = hashlib.sha1(said.encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit."""
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Faults:
    """What goes wrong, by the file's name; each cut happens once, at its byte."""

    cuts: dict[str, list[int]] = field(default_factory=dict)
    reset: bool = False  # cut by a reset instead of an end
    wrong: dict[str, bytes] = field(default_factory=dict)  # served instead, for its own size
    status: dict[str, int] = field(default_factory=dict)  # part of a path -> status of the answer
    said: str = "something is wrong here"  # with such a status
    seconds: float = 0.0  # before each piece


class HubServer:
    """The hub: its models and its faults."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.faults = Faults()
        self.requests: list[str] = []  # like "GET /org/name/resolve/..."
        self.sent = 0  # bytes of files
        hub = self

        class Handler(_Handler):
            server_of_models = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, folder: Path, ref: str = "main") -> str:
        """Commit the files of a folder to a model; return the commit."""
        files = {
            path.relative_to(folder).as_posix(): Blob(path.read_bytes())
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        files[".gitattributes"] = Blob(b"*.data filter=lfs\n")
        return self.models.setdefault(name, Model()).commit(files, ref)

    def asked(self, part: str) -> list[str]:
        """Return the requests whose path has a part."""
        return [request for request in self.requests if part in request]

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        """Answer requests until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_of_models: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = 0

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.hub.requests.append(f"{self.command} {path}")
        for part, status in self.hub.faults.status.items():
            if part in path:
                return self._refuse(status, self.hub.faults.said)
        for pattern, route in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                return route(self, **found.groupdict())
        return self._refuse(404, f"no route {path}")

    @property
    def hub(self) -> HubServer:
        return self.server_of_models

    def _json(self, found: object) -> None:
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, said: str, code: str = "") -> None:
        told = {"X-Error-Message": said} if said.isprintable() else {}
        told |= {"X-Error-Code": code} if code else {}
        told |= {"Location": self.path} if status == 307 else {}  # a loop
        self._send(status, json.dumps({"error": said}).encode(), told)

    def _model(self, name: str, revision: str) -> tuple[str, dict[str, Blob]] | None:
        """Find a commit and its files; answers if there is none."""
        model = self.hub.models.get(name)
        if model is None:
            self._refuse(401, "Repository not found", "RepoNotFound")
            return None
        if (sha := model.find(revision)) is None:
            self._refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return sha, model.commits[sha]

    def info(self, name: str, revision: str = "main") -> None:
        if found := self._model(name, revision):
            sha, files = found
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": name, "sha": sha, "siblings": siblings, "tags": []})

    def tree(self, name: str, revision: str) -> None:
        if found := self._model(name, revision):
            self._json([_entry(file, blob) for file, blob in found[1].items()])

    def file(self, name: str, revision: str, file: str) -> None:
        if not (found := self._model(name, revision)):
            return None
        sha, files = found
        if self.hub.models[name].gated:
            said = f"Access to model {name} is restricted. Visit {self.hub.url}/{name} to ask for access."
            return self._refuse(403, said, "GatedRepo")
        if (blob := files.get(file)) is None:
            return self._refuse(404, "Entry not found", "EntryNotFound")
        return self._file(sha, file, blob)

    def _file(self, sha: str, file: str, blob: Blob) -> None:
        faults = self.hub.faults
        etag = blob.sha256 or blob.oid
        blob = Blob(faults.wrong[file]) if file in faults.wrong else blob
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else 0
        end = min(int(ranged[2]) + 1, blob.nbytes) if ranged and ranged[2] else blob.nbytes
        self.send_response(206 if ranged else 200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(blob.nbytes))
        self.send_header("Content-Length", str(end - start))
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{blob.nbytes}")
        self.end_headers()
        if self.command == "HEAD":
            return
        at = start
        for piece in blob.pieces(start):
            time.sleep(faults.seconds)
            piece = piece[: end - at]
            cuts = faults.cuts.get(file, [])
            if cut := next((each for each in cuts if at <= each < at + len(piece)), None):
                cuts.remove(cut)
                self.wfile.write(piece[: cut - at])
                self._cut()
                return
            self.wfile.write(piece)
            at += len(piece)
            self.hub.sent += len(piece)

    def _cut(self) -> None:
        self.close_connection = True
        if self.hub.faults.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR) if not self.hub.faults.reset else None
        self.connection.close()


def _entry(file: str, blob: Blob) -> dict[str, Any]:
    lfs = {"size": blob.nbytes, "oid": blob.sha256, "pointerSize": 130}
    found = {"type": "file", "path": file, "size": blob.nbytes, "oid": blob.oid}
    return found | ({"lfs": lfs} if blob.sha256 else {})


def impatient(patch: pytest.MonkeyPatch) -> None:
    """Let nobody wait before another try, and small files be what large ones are."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    for module in (file_download, _http):
        patch.setattr(module, "time", SimpleNamespace(sleep=lambda s: None, time=time.time))
    # What is short of a piece is lost when the connection is cut.
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)


def cache_of(name: str) -> Path:
    """Return the folder of a model in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


NAME, REVISION = r"(?P<name>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES: dict[str, Callable[..., None]] = {
    f"/api/models/{NAME}": _Handler.info,
    f"/api/models/{NAME}/revision/(?P<revision>.+)": _Handler.info,
    f"/api/models/{NAME}/tree/{REVISION}": _Handler.tree,
    f"/{NAME}/resolve/{REVISION}/(?P<file>.+)": _Handler.file,
}
