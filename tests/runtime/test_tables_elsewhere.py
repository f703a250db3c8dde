"""Bundles whose tables are elsewhere: the same text, from a disk tier that holds a part of them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import command_refused, refused
from installed import DEMO
from range_server import RangeServer, serving

import stem_edge
from stem_edge import load
from stem_edge.bundle.manifest import TABLES
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.runtime.first_load.safety import check_safety
from stem_edge.runtime.rows.disk_tier import file_slot_nbytes

PROMPT = "Not all rows fit: the cache must choose, and choose again. "


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle without the shards of its tables."""
    bundle = tmp_path_factory.mktemp("here") / "demo"
    shutil.copytree(DEMO, bundle)
    shutil.rmtree(bundle / TABLES / "records" / "c")
    return bundle


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving(DEMO / TABLES) as state:
        yield state


@pytest.fixture(scope="module")
def text() -> str:
    with load(DEMO) as model:
        return model.generate_text(PROMPT)


def test_a_tier_of_a_twentieth_of_the_records_gives_the_same_text(
    here: Path, server: RangeServer, text: str, tmp_path: Path
) -> None:
    layout = stem_edge.open_bundle(DEMO).manifest.tables
    assert layout is not None
    tier = layout.records // 20 * file_slot_nbytes(layout)
    read, hits = [], []
    for _ in range(2):
        with load(
            here,
            tables=server.url,
            disk_tier=tier,
            slots=16,
            cache_dir=tmp_path,
            warm_start=False,
            trial=False,
        ) as model:
            assert model.generate_text(PROMPT) == text
            stats = model.stats
            read.append(stats.network_bytes)
            hits.append(stats.tier_hits)
            assert stats.tier_hits + stats.tier_misses == stats.row_misses
            assert stats.stall_seconds > 0
            assert ("reads from the network" in stats.line()) == (stats.network_reads > 0)
            assert "of the rest on disk" in stats.line()
    assert read[1] < read[0]
    assert sum(read) == sum(nbytes for _, nbytes in server.requests)
    assert hits[1] > hits[0]
    (kept,) = (tmp_path / "tier").glob("*.rows")
    assert kept.stat().st_size == tier


@pytest.mark.parametrize("options", [{"resident": True}, {"disk_tier": 0}, {"overlap": False}])
def test_other_ways_to_load_give_the_same_text(
    here: Path, text: str, options: dict[str, object]
) -> None:
    with load(here, tables=str(DEMO / TABLES), **options) as model:  # type: ignore[arg-type]
        assert model.generate_text(PROMPT) == text


def test_what_does_not_go_together_is_refused(here: Path, server: RangeServer) -> None:
    refused(lambda: load(here), BundleError, "records")
    refused(lambda: load(DEMO, disk_tier="1GB"), InputError, "disk_tier")
    refused(lambda: load(here, tables=server.url, emulate_flash="ufs2"), InputError, "tables")
    refused(lambda: load(here, tables=server.url, disk_tier="x"), InputError, "disk_tier")
    refused(lambda: load(here, tables="nosuch://there"), InputError, "nosuch")


def test_a_place_without_the_tables_is_named(here: Path, server: RangeServer) -> None:
    url = f"{server.url}/not"
    with load(here, tables=url, disk_tier=0) as model:
        refused(lambda: model.generate_text(PROMPT), RowReadError, f"{url}/records/c/", "no such")


def test_commands_say_where_the_tables_are(
    here: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(here), "--tables", server.url]) == 0
    said = capsys.readouterr().out
    assert f"shards are at {server.url}, and were not looked at" in said
    assert f"{TABLES}/records/c/0/0 (elsewhere)" in said
    command_refused(capsys, ["inspect", here], "all shards", "--tables URL")
    planned = ["fit", here, "--tables", server.url, "--network", "20ms,100MB", "--disk-tier", "1MB"]
    assert main([*map(str, planned), "--bandwidth", "17GB"]) == 0
    assert f"--tables {server.url} --disk-tier 1MB" in capsys.readouterr().out
    options = ["--disk-tier", "1MB", "--bandwidth", "17GB"]
    command_refused(capsys, ["fit", DEMO, *options], "--network is missing, and --disk-tier")
    assert main(["inspect", str(here), "--tables", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables_url"] == server.url
    command_refused(capsys, ["inspect", here, "--geometry", "--tables", server.url], "--tables")
    command_refused(capsys, ["verify", here, "--runs", "--tables", server.url], "--tables")


@pytest.mark.slow
def test_verify_leaves_the_shards_out_and_says_so(
    here: Path, server: RangeServer, tmp_path: Path
) -> None:
    """Its trial reads a few rows, in a process of its own."""
    found = check_safety(here, cache_dir=tmp_path, tables=server.url)
    assert found.safe
    assert f"without the 1 shards at {server.url}, which were not hashed" in found.checked
    assert not any("/c/" in name for name in found.files)
    assert server.requests


@pytest.mark.slow
def test_tables_out_of_reach_leave_no_verdict(
    here: Path, server: RangeServer, tmp_path: Path
) -> None:
    """Otherwise the graph for prompts would stay unused after they are back."""
    url = f"{server.url}/not"
    refused(lambda: load(here, tables=url, cache_dir=tmp_path), RowReadError, url)
    with load(here, tables=server.url, cache_dir=tmp_path) as model:
        assert not model.plan.prefill_refused
