"""Shards elsewhere: read in ranges, once more where that helps, and refused by name where it does not."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from contract import refused
from range_server import Fault, RangeServer, serving
from stores import ids, write_store

from stem_edge.errors import InputError, RowReadError
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows import remote
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.remote import printable_url
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import RowStore, open_store
from stem_edge.runtime.rows.table_rows import TableRows
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat

V = 40
LAYOUT = RecordLayout(records=V, layers=(1, 3), parts=((32,),), row_type="int8", group_size=16)
STRIDE, PER_SHARD = LAYOUT.record_nbytes + 4, 16  # so three shards, the last one with 8 records
RECORDS: U8 = np.random.default_rng(1).integers(0, 256, (V, LAYOUT.record_nbytes), np.uint8)
EVERY = np.arange(V)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)


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


def open_far(server: RangeServer, before: str = "") -> RowStore:
    format = TableFormat(tokens=V, stored=LAYOUT)
    return open_store(server.root.parent / "here", format, url=before + server.url)


def test_each_record_is_one_request_and_opening_makes_none(server: RangeServer) -> None:
    with open_far(server) as store:
        assert not server.requests
        assert np.array_equal(store.read(EVERY), RECORDS)
        assert len(server.requests) == V
        assert np.array_equal(store.read(ids(7, 7, 39)), RECORDS[[7, 7, 39]])
        assert len(server.requests) == V + 2
        counted = store.counters()
        assert (counted.network_reads, counted.network_bytes) == (V + 2, (V + 2) * STRIDE)


# What goes wrong -> what the error says if it stays.
FAULTS: dict[Fault, str] = {
    "500": "500",
    "403": "403",
    "cut": "ClientPayloadError",
    "reset": "ClientPayloadError",
    "wrong": "crc32c",
    "hang": "TimeoutError",
    "416": "only 0 of 84 bytes",
    "loop": "TooManyRedirects",
    "no ranges": "serves no ranges",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_another_request_and_names_the_shard_if_it_stays(
    server: RangeServer, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hang":
        monkeypatch.setattr(remote, "LIMIT_SECONDS", 0.3)
    with open_far(server) as store:
        store.read(ids(0))
        begun = len(server.requests)
        server.fault = lambda number, path: fault if number == begun else None
        assert np.array_equal(store.read(ids(3)), RECORDS[[3]])
        assert len(server.requests) == begun + 2 or fault == "hang"  # a busy machine may be late
        server.fault = lambda number, path: fault
        for numbers in (ids(17), ids(3, 17)):
            error = refused(
                lambda numbers=numbers: store.read(numbers),  # type: ignore[misc]
                *(RowReadError, f"{server.url}/records/c/", "at byte", FAULTS[fault]),
            )
            assert error.isprintable()
        server.fault = lambda number, path: None
        assert np.array_equal(store.read(EVERY), RECORDS)


def test_a_server_without_ranges_sends_no_shard(server: RangeServer) -> None:
    server.fault = lambda number, path: "no ranges"
    with open_far(server) as store:
        refused(lambda: store.read(ids(5)), RowReadError, "serves no ranges")
        assert store.counters().network_bytes == 0


def test_what_is_not_wanted_any_more_neither_fails_a_step_nor_is_waited_for(
    server: RangeServer,
) -> None:
    store = open_far(server)
    rows = TableRows(store, RowCache(ArraySlots(LAYOUT, 4)))
    store.read(ids(0))
    begun, server.fault = len(server.requests), lambda number, path: "500"
    rows.expect(ids(5))
    refused(lambda: rows.slots(ids(5)), RowReadError, "500")
    assert len(server.requests) == begun + 2
    rows.expect(ids(5))
    while len(server.requests) < begun + 4:
        time.sleep(0.001)
    server.fault = lambda number, path: None
    rows.slots(ids(7))
    begun, server.fault = len(server.requests), lambda number, path: "hang"
    rows.expect(ids(9))
    while len(server.requests) == begun:
        time.sleep(0.001)
    started = time.perf_counter()
    rows.close()
    assert time.perf_counter() - started < remote.LIMIT_SECONDS / 10


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "shorter": (lambda data: data[:STRIDE], "bytes"),
    "of another layout": (lambda data: data[::-1], "crc32c"),
    "of other tables": (lambda data: bytes(len(data)), "crc32c"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_is_another_is_refused_when_it_is_used(
    server: RangeServer, damage: str
) -> None:
    change, said = DAMAGES[damage]
    path = server.root / "records/c/1/0"
    path.write_bytes(change(path.read_bytes()))
    with open_far(server) as store:
        store.read(ids(1))
        refused(
            lambda: store.read(ids(20)), RowReadError, f"{server.url}/records/c/1/0", said, "URL"
        )
        path.unlink()
        refused(lambda: store.read(ids(20)), RowReadError, "no such file")
        assert np.array_equal(store.read(ids(3, 39)), RECORDS[[3, 39]])


def test_without_fsspec_the_line_that_installs_it(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(lambda: open_far(server), InputError, "pip install 'stem-edge[remote]'")


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
