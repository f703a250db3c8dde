"""Bundles whose tables are elsewhere: the same text, and refusals that say where they are."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract import command_refused, refused
from installed import DEMO
from loading import load_fixed
from range_server import RangeServer, serving

from stem_edge import load
from stem_edge.bundle.manifest import TABLES
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, InputError, RowReadError

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


def test_rows_over_a_network_give_the_same_text(
    here: Path, server: RangeServer, text: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"slots": 16, "cache_dir": tmp_path}
    load(
        DEMO, cache_dir=tmp_path
    ).close()  # which measures the graph for prompts, with rows that are here
    with load_fixed(here, tables=server.url, **options) as model:
        assert model.generate_text(PROMPT) == text
        stats = model.stats
        assert stats.network_bytes == sum(nbytes for _, nbytes in server.requests)
        assert stats.stall_seconds > 0 and stats.flash_bytes == 0
        assert f"in {stats.network_reads} reads from the network" in stats.line()


def test_what_does_not_go_together_is_refused(here: Path, server: RangeServer) -> None:
    refused(lambda: load(here), BundleError, "records")
    refused(lambda: load(here, tables="nosuch://there"), InputError, "nosuch")


def test_a_place_without_the_tables_is_named(here: Path, server: RangeServer) -> None:
    url = f"{server.url}/not"
    with load(here, tables=url) as model:
        refused(lambda: model.generate_text(PROMPT), RowReadError, f"{url}/records/c/", "no such")


def test_commands_say_where_the_tables_are(
    here: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(here), "--tables", server.url]) == 0
    said = capsys.readouterr().out
    assert f"shards are at {server.url}, and were not looked at" in said
    command_refused(capsys, ["inspect", here], "all shards", "--tables URL")
    assert main(["inspect", str(here), "--tables", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables_url"] == server.url
    command_refused(capsys, ["inspect", here, "--geometry", "--tables", server.url], "--tables")


def test_verify_leaves_the_shards_out_and_says_so(
    here: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(here), "--tables", server.url]) == 0
    assert "as exported, without the shards of the tables\n" in capsys.readouterr().out
    assert main(["verify", str(here)]) == 1
    assert not server.requests
