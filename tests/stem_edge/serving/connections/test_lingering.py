"""The end of a connection whose answer is not yet taken."""

from __future__ import annotations

import asyncio

import pytest

from stem_edge.serving.connections import lingering
from stem_edge.serving.connections.lingering import Lingering

KIB = 1 << 10


class Slow(asyncio.Transport):
    """Sends to a client that has left so many bytes of an answer, each time that it is asked."""

    def __init__(self, left: list[int]) -> None:
        super().__init__()
        self.left, self.aborted = left, asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.left.pop(0)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize(
    ("left", "unseen"),
    [
        ([9 * KIB, 8 * KIB, 7 * KIB, 6 * KIB + 1], 0),
        ([9 * KIB, 9 * KIB, 1], 1),
        ([0, 0, 0], 1),
    ],
    ids=["steady, then slower", "none", "all is read"],
)
def test_who_reads_on_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, left: list[int], unseen: int
) -> None:
    monkeypatch.setattr(lingering, "SECONDS", 0.01)

    async def ended() -> None:
        transport = Slow(left)
        Lingering(transport, lambda: False).close()
        await asyncio.wait_for(transport.aborted.wait(), 30)

    asyncio.run(ended())
    assert len(left) == unseen
