"""Shards elsewhere: read in ranges, again where that helps, and refused by name where it does not."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from contract import refused
from range_server import Fault, RangeServer, serving
from stores import ids, write_store

from stem_edge.errors import InputError, RowReadError
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows import remote
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.records import READ_AT_ONCE
from stem_edge.runtime.rows.remote import RemoteShards, joined, printable_url
from stem_edge.runtime.rows.shards import ByteRange, Fill
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import RowStore, open_store
from stem_edge.tables.rows import RecordLayout

V = 40
LAYOUT = RecordLayout(records=V, layers=(1, 3), parts=((32,),), row_type="int8", group_size=16)
STRIDE, PER_SHARD = LAYOUT.record_nbytes + 4, 16  # so three shards, the last one with 8 records
RECORDS: U8 = np.random.default_rng(1).integers(0, 256, (V, LAYOUT.record_nbytes), np.uint8)
EVERY = np.arange(V)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "TRIES", 3)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """Serve the shards of a table store, of which only the descriptions are in tmp_path/here."""
    write_store(tmp_path / "there", LAYOUT, RECORDS, PER_SHARD)
    for path in (tmp_path / "there").rglob("zarr.json"):
        here = tmp_path / "here" / path.relative_to(tmp_path / "there")
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes(path.read_bytes())
    with serving(tmp_path / "there") as state:
        yield state


def open_far(server: RangeServer) -> RowStore:
    from stem_edge.tables.store import TableFormat

    format = TableFormat(tokens=V, stored=LAYOUT)
    return open_store(server.root.parent / "here", format, url=server.url)


def test_records_come_in_few_requests_and_opening_makes_none(server: RangeServer) -> None:
    with open_far(server) as store:
        assert not server.requests
        assert np.array_equal(store.read(EVERY), RECORDS)
        # Records lie side by side, so that a shard is one range; and each is tried once.
        assert len(server.requests) == 2 * 3
        assert np.array_equal(store.read(ids(7, 5, 39)), RECORDS[[7, 5, 39]])
        assert len(server.requests) == 2 * 3 + 2
        traffic = store.traffic
        assert traffic is not None
        assert (traffic.requests, traffic.repeated) == (8, 0)
        assert traffic.nbytes == sum(nbytes for _, nbytes in server.requests)


# What goes wrong -> whether it may pass, and what the error says where it does not.
FAULTS: dict[Fault, tuple[bool, str]] = {
    "500": (True, "500"),
    "cut": (True, "ClientPayloadError"),
    "reset": (True, "ClientPayloadError"),
    "wrong": (True, "crc32c"),
    "hang": (True, "Timeout"),
    "416": (True, "only 0 of 84 bytes"),
    "loop": (True, "TooManyRedirects"),
    "403": (False, "403"),
    "no ranges": (False, "serves no ranges"),
}


@pytest.mark.parametrize("fault", [fault for fault, (passes, _) in FAULTS.items() if passes])
def test_a_fault_that_passes_costs_another_request(
    server: RangeServer, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_far(server) as store:
        store.read(ids(0))
        end_soon(fault, monkeypatch)
        begun = len(server.requests)
        server.fault = lambda number, path: fault if number == begun else None
        assert np.array_equal(store.read(ids(3)), RECORDS[[3]])
        # On a busy machine, another request may take too long.
        assert len(server.requests) == begun + 2 or fault == "hang"


def end_soon(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """End requests that hang, without ending those of other faults on a busy machine."""
    if fault == "hang":
        monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_names_shard_and_offset(
    server: RangeServer, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, said = FAULTS[fault]
    with open_far(server) as store:
        store.read(ids(0, 17))
        begun = len(server.requests)
        end_soon(fault, monkeypatch)
        server.fault = lambda number, path: fault
        for numbers in (ids(17), ids(3, 17)):
            read = partial(store.read, numbers)
            error = refused(read, RowReadError, f"{server.url}/records/c/", "at byte")
            assert said in error
        assert passes or len(server.requests) <= begun + 3
        monkeypatch.undo()
        server.fault = lambda number, path: None
        assert np.array_equal(store.read(EVERY), RECORDS)


def test_a_server_without_ranges_is_asked_once(server: RangeServer) -> None:
    server.fault = lambda number, path: "no ranges"
    with open_far(server) as store:
        for times in (1, 2):  # also the second time not for all shards at once
            refused(lambda: store.read(EVERY), RowReadError, "serves no ranges")
            assert len(server.requests) == times
        assert store.traffic is not None and store.traffic.nbytes == 0


def test_answers_are_held_in_parts(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ahead = list[int](), RemoteShards.ahead

    def counted(shards: RemoteShards, pieces: Sequence[ByteRange]) -> Fill:
        asked.append(len(pieces))
        return ahead(shards, pieces)

    monkeypatch.setattr(RemoteShards, "ahead", counted)
    with open_far(server) as store:
        store.read(EVERY)
    assert asked == [READ_AT_ONCE, V - READ_AT_ONCE]


def test_a_dead_server_is_waited_for_once(server: RangeServer) -> None:
    store = open_far(server)
    rows = Prefetcher(store, RowCache(ArraySlots(LAYOUT, 4)))
    store.read(ids(0))
    begun, server.fault = len(server.requests), lambda number, path: "500"
    rows.submit(ids(5))
    refused(lambda: rows.fetch(ids(5)), RowReadError, "500")
    assert len(server.requests) == begun + remote.TRIES
    # What is not wanted any more does not fail a step.
    rows.submit(ids(5))
    while len(server.requests) < begun + 2 * remote.TRIES:
        time.sleep(0.001)
    server.fault = lambda number, path: None
    rows.fetch(ids(7))
    server.fault = lambda number, path: "hang"
    begun = len(server.requests)
    rows.submit(ids(9))
    while len(server.requests) == begun:
        time.sleep(0.001)
    started = time.perf_counter()
    rows.close()  # nobody waits for what hangs
    assert time.perf_counter() - started < remote.SILENCE_SECONDS / 4


def test_a_slow_line_is_waited_for(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.5)
    layout = RecordLayout(records=8, layers=(1,), parts=((65536,),), row_type="int8", group_size=64)
    records = np.zeros((8, layout.record_nbytes), np.uint8)
    format = write_store(server.root / "slow", layout, records, 8)
    with open_store(server.root / "slow", format, url=f"{server.url}/slow") as store:
        store.read(ids(0))
        begun, server.bandwidth = time.perf_counter(), 6e5
        assert np.array_equal(store.read(np.arange(8)), records)
        assert store.traffic is not None and not store.traffic.repeated
        assert time.perf_counter() - begun > 0.5


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-STRIDE]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "of another layout": lambda path: path.write_bytes(path.read_bytes()[::-1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_is_another_is_refused_when_it_is_used(
    server: RangeServer, damage: str
) -> None:
    DAMAGES[damage](server.root / "records/c/1/0")
    with open_far(server) as store:
        store.read(ids(1))
        refused(lambda: store.read(ids(20)), RowReadError, f"{server.url}/records/c/1/0", "URL")
        assert np.array_equal(store.read(ids(3, 39)), RECORDS[[3, 39]])


def test_a_shard_replaced_meanwhile_is_told_by_its_checksums(server: RangeServer) -> None:
    with open_far(server) as store:
        store.read(ids(0))
        path = server.root / "records/c/0/0"
        path.write_bytes(path.read_bytes()[STRIDE // 2 :])
        refused(lambda: store.read(ids(5)), RowReadError, "record 5", "crc32c", "URL")


def test_without_fsspec_the_line_that_installs_it(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(lambda: open_far(server), InputError, "pip install 'stem-edge[remote]'")


@pytest.mark.parametrize("url", ["nosuch://there/tables.zarr", "dropbox://there/tables.zarr"])
def test_a_protocol_that_nothing_here_reads(server: RangeServer, url: str) -> None:
    server.url = url
    refused(lambda: open_far(server), InputError, url)


URLS = {
    "https://me:secret@host/tables.zarr/": "https://host/tables.zarr",
    "https://me:se@cret@host:80/t": "https://host:80/t",
    "https://me:se/cret@host/t": "https://host/t",
    "https://me:se?cret@host/t": "https://host/t",
    "https://host/t/?sig=secret#secret": "https://host/t",
    "https://[::1]:80/t": "https://[::1]:80/t",
    "hf://org/name@commit/t": "hf://org/name@commit/t",
    "/a/path#1?": "/a/path#1?",
}


@pytest.mark.parametrize("url", URLS)
def test_messages_show_no_password(url: str) -> None:
    assert printable_url(url) == URLS[url]


class RefusedError(Exception):
    """What httpx and requests make of a status."""

    def __init__(self, status: int) -> None:
        super().__init__("for url 'https://me:se@cret@host/t?secret'")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(("status", "tries"), [(401, 1), (403, 1), (429, 3), (503, 3)])
def test_what_other_libraries_say_lasts_is_not_repeated(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, status: int, tries: int
) -> None:
    asked = list[str]()

    def cat_file(path: str, **_: object) -> bytes:
        asked.append(path)
        raise RefusedError(status)

    files = SimpleNamespace(async_impl=False, cat_file=cat_file)
    monkeypatch.setattr(remote, "open_url", lambda url: (files, "root"))
    with open_far(server) as store:
        error = refused(
            lambda: store.read(ids(0)), RowReadError, "for url 'https://host/t' (RefusedError)"
        )
    assert len(asked) == tries and "cret" not in error


GAP, MOST = remote.GAP_NBYTES, remote.RANGE_NBYTES
JOINED: list[tuple[list[ByteRange], list[tuple[int, int, int]]]] = [
    ([], []),
    ([ByteRange(0, 0, 9)], [(0, 0, 9)]),
    ([ByteRange(0, 9, 9), ByteRange(0, 0, 9)], [(0, 0, 18)]),
    ([ByteRange(0, 0, 9), ByteRange(0, 0, 9)], [(0, 0, 9)]),
    ([ByteRange(0, 0, 9), ByteRange(0, 9 + GAP, 9)], [(0, 0, 18 + GAP)]),
    ([ByteRange(0, 0, 9), ByteRange(0, 10 + GAP, 9)], [(0, 0, 9), (0, 10 + GAP, 19 + GAP)]),
    ([ByteRange(0, 0, 9), ByteRange(1, 9, 9)], [(0, 0, 9), (1, 9, 18)]),
    ([ByteRange(0, 0, MOST), ByteRange(0, MOST, 9)], [(0, 0, MOST), (0, MOST, MOST + 9)]),
    ([ByteRange(0, 0, 2 * MOST)], [(0, 0, 2 * MOST)]),
]


@pytest.mark.parametrize(("pieces", "ranges"), JOINED)
def test_pieces_that_lie_close_are_one_range(
    pieces: list[ByteRange], ranges: list[tuple[int, int, int]]
) -> None:
    found = joined(pieces)
    assert [tuple(wanted) for wanted, _ in found] == ranges
    assert sorted(piece for _, inside in found for piece in inside) == sorted(set(pieces))
