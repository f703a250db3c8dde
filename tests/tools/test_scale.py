"""The figures of docs/scale.md: sizes as exported, caches as the runtime's, times by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scale
from scale_machines import GPU, ON_PHONE, RUNS, machines
from scale_shapes import SHAPES, SHARES, model_of, read_nbytes, shapes, sizes_of, stem_layers
from scale_steps import ROWS_RATE, arrival, device_allows, runtime_allows, slots_in, step_of
from scale_tables import Table
from scale_text import Reads, Text, hits, in_step, no_reads, run_cache

from stem_edge.measuring.planning.hit_rates import simulate
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.emulated_flash import FlashProfile
from stem_edge.tables.token_counts import count_tokens


def some_ids(count: int, most: int = 60) -> I64:
    rng = np.random.default_rng(3)
    return np.minimum(rng.zipf(1.4, count), most).astype(np.int64)


def reads_of(batch: int, *read: int) -> Reads:
    tokens = np.full(len(read), batch)
    return Reads(tokens, tokens, np.array(read))


def test_tables_are_placed_as_in_the_paper() -> None:
    assert [len(stem_layers(share, 16)) for share in SHARES] == [5, 8, 15]
    assert stem_layers("1/3", 16) == (2, 5, 8, 11, 14)


def test_sizes_are_those_of_an_export() -> None:
    """Bytes of the file that `stem-edge export` wrote of the 1B shape (docs/results.md)."""
    full = sizes_of("1B", "full")
    assert full.backbone_nbytes == 665_600_000
    assert read_nbytes(full) == 126_724
    model = model_of("1B", "1/3")
    assert round((model.backbone_parameters + model.table_parameters) / 1e9, 2) == 6.67
    mixed, int8 = sizes_of("1B", "full", "mixed"), sizes_of("1B", "full")
    assert mixed.tables_nbytes / int8.tables_nbytes == pytest.approx(0.524, abs=5e-4)


def test_a_table_of_shapes() -> None:
    rows = shapes(["1B", "14B"]).records()
    assert all(len(row) == 11 for row in rows)  # no two columns of one name
    assert len(rows) == 2 * len(SHARES)
    for row in rows:
        assert float(row["a step reads, GB"]) < float(row["dense, GB"])


@pytest.mark.parametrize("known", [False, True])
def test_one_sequence_is_what_the_project_simulates(known: bool) -> None:
    ids, slots = some_ids(400), 8
    counts = count_tokens(some_ids(50), 64) if known else None
    found = run_cache(in_step(ids, 1), slots, counts, records=64)
    assert found.hit_rate == pytest.approx(simulate(ids, 64, slots, counts)[0])


def test_sequences_share_what_a_step_reads() -> None:
    ids = in_step(np.array([5, 5, 7, 5, 6, 7]), 2)
    assert [step.tolist() for step in ids] == [[5, 5], [5, 6], [7, 7]]
    without = run_cache(ids, 0, records=8)
    assert without.distinct.tolist() == without.read.tolist() == [1, 2, 1]
    cached = run_cache(ids, 8, records=8)
    assert cached.read.tolist() == [1, 1, 1]
    assert cached.hit_rate == 0.5


def test_a_settled_cache_has_seen_the_first_half() -> None:
    text = Text(np.tile(np.arange(5), 4))
    assert text.reads(1, 5).hit_rate == 1
    assert text.reads(1, 0).hit_rate == 0
    assert text.reads(1, 10**6) is text.reads(1, 5)


def test_hit_rates_of_a_text() -> None:
    rows = hits(some_ids(2000), some_ids(500), slots=(16, 32)).records()
    whole = [float(row["whole text, from nothing"]) for row in rows]
    assert whole == [float(row["conversations of 2,000 ids, from nothing"]) for row in rows]
    assert whole == sorted(whole)
    assert float(rows[0]["the same, from counts of another text"]) > whole[0]


def test_rows_arrive_after_the_device_and_the_runtime() -> None:
    flash = FlashProfile(bandwidth=1e9, latency=1e-4, depth=4)
    taken = arrival(flash, 1_000_000, reads_of(8, 0, 1, 5))
    each = 1e-3 + 1e6 / ROWS_RATE
    assert taken == pytest.approx([0, 1e-4 + each, 2e-4 + 5 * each])
    assert device_allows(flash, 1000, reads_of(8, 4)) == pytest.approx(8 / 4 / (1e-4 / 4))
    assert runtime_allows(1_000_000, reads_of(8, 4)) == pytest.approx(ROWS_RATE * 2 / 1e6)


def test_a_step_reads_weights_once_and_rows_as_they_are_missed() -> None:
    sizes = sizes_of("1B", "full")
    step = step_of(ON_PHONE, sizes, 1024, no_reads(), 0)
    assert step.rows == 0
    assert step.weights == pytest.approx(sizes.step_nbytes / (0.8 * ON_PHONE.bandwidth))
    assert step.limit(ON_PHONE) == "weights"
    many = step_of(GPU, sizes, 1024, reads_of(4096, 4096), 0)
    assert many.limit(GPU) == "memory is too small"
    slow = replace(ON_PHONE, tables=FlashProfile(1e6, 1.0, 1))
    assert step_of(slow, sizes, 1024, reads_of(1, 1), 0).limit(slow) == "rows"


def test_a_cache_has_no_more_slots_than_the_model_has_records() -> None:
    assert slots_in(sizes_of("1B", "1/3"), 10**12) == SHAPES["1B"][0]


def test_a_table_of_machines() -> None:
    table = machines(Text(some_ids(600, most=5000)), "full", 64)
    assert len(table.rows) == sum(len(models) * len(batches) for _, models, batches in RUNS)
    assert all(len(row) == len(table.headings) for row in table.records())


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some_ids(600).astype("<i4").tofile(tmp_path / "ids.int32")
    ids = str(tmp_path / "ids.int32")
    monkeypatch.setattr(sys, "argv", ["scale.py", "machines", ids, "--share", "1/3", "--json"])
    scale.main()
    names = {row["machine"] for row in json.loads(capsys.readouterr().out)}
    assert names == {machine.name for machine, _, _ in RUNS}


def test_a_table_is_markdown() -> None:
    table = Table("name", "MB")
    table.add("a", 1234.5)
    table.add("b", 12)
    assert table.markdown() == "| name | MB |\n| --- | ---: |\n| a | 1,234 |\n| b | 12 |"
