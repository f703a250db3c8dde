"""How many connections the system allows."""

from __future__ import annotations

import pytest

resource = pytest.importorskip("resource", reason="limits of POSIX")

from stem_edge.serving.connections.config import Room, room

ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "expected"),
    [
        (128, 128, None, Room(32, 8)),
        (128, 256, 256, Room(96, 24)),
        (1024, 1 << 20, 1576, Room(1000, 128)),
        (1024, ANY, 1576, Room(1000, 128)),
        (ANY, ANY, None, Room(1000, 128)),
        (20, 20, None, Room(1, 1)),
    ],
)
def test_room_is_what_open_files_leave(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, expected: Room
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: limits.append(given))
    assert room() == expected
    assert limits[-1][0] == (raised or soft)
