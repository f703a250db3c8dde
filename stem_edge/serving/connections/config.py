"""How uvicorn is run, and how many connections the system allows."""

from __future__ import annotations

import sys
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from stem_edge.serving.connections.connection import Connection
from stem_edge.serving.connections.turns import REQUEST

MAX_CONNECTIONS = 1000
BACKLOG = 128  # connections that are accepted in a turn of the event loop
QUEUE = 1024  # that wait to be accepted; one that finds no place tries again after a second
ENDING = (
    4  # turns of the event loop from accepting a connection to the end of the one that makes room
)
OTHER_FILES = 64  # of the model, of processes that render templates, and of the system's libraries
ENDING_SECONDS = 5  # for the last bytes of answers


class Room(NamedTuple):
    """How many connections there may be, and how many are accepted in a turn of the event loop."""

    connections: int
    backlog: int


def room() -> Room:
    """Return the room for connections, after raising the limit of open files as far as that needs.

    Without a file for it, no connection is accepted, and the event loop tries for ever.
    """
    most = MAX_CONNECTIONS + ENDING * BACKLOG + OTHER_FILES
    left = min(most, _file_limit(most)) - OTHER_FILES
    backlog = max(1, min(BACKLOG, left // (2 * ENDING)))
    return Room(max(1, min(MAX_CONNECTIONS, left - ENDING * backlog)), backlog)


def _file_limit(wanted: int) -> int:
    """Return how many files may be open, after raising the limit to `wanted` if the system lets it."""
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return raised
    return soft


def config_of(program: ASGIApp, room: Room) -> uvicorn.Config:
    """Return how to run a program."""
    return uvicorn.Config(
        program,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=room.connections,
        backlog=room.backlog,
        timeout_keep_alive=int(REQUEST.seconds),
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
