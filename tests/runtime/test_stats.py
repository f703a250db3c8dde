"""Figures of a single call."""

import json
from dataclasses import replace

import pytest

from stem_edge.runtime.rows.prefetch import Rows
from stem_edge.runtime.rows.records import RowCounters
from stem_edge.runtime.stats import GenerationStats, Recorder

STATS = GenerationStats(
    prompt_tokens=30,
    new_tokens=11,
    prefill_seconds=0.5,
    decode_seconds=4.0,
    first_token_seconds=0.6,
    row_hits=3,
    row_misses=1,
    flash_bytes=2_500_000,
    stall_seconds=0.025,
)


def test_speeds_leave_the_first_token_to_the_prompt() -> None:
    assert STATS.prefill_tokens_per_second == 60
    assert STATS.decode_tokens_per_second == 2.5


def test_hit_rate_is_a_share_of_all_uses() -> None:
    assert STATS.hit_rate == 0.75


@pytest.mark.parametrize("stats", [GenerationStats(), GenerationStats(new_tokens=1)])
def test_nothing_measured_is_zero(stats: GenerationStats) -> None:
    assert stats.prefill_tokens_per_second == 0
    assert stats.decode_tokens_per_second == 0
    assert stats.hit_rate == 0


def test_dict_has_counts_and_figures_and_survives_json() -> None:
    found = json.loads(json.dumps(STATS.to_dict()))
    assert (found["new_tokens"], found["hit_rate"]) == (11, 0.75)
    assert (found["prefill_tokens_per_second"], found["decode_tokens_per_second"]) == (60, 2.5)


def test_line_for_people() -> None:
    assert STATS.line() == (
        "prompt 30 tokens at 60/s, new 11 at 2.5/s, first after 600 ms; "
        "rows 75% hits, 2.50 MB read from flash, 25 ms stalled"
    )


def test_several_sequences() -> None:
    many = replace(STATS, sequences=3, decode_steps=4, decode_records=6, row_hits=15, row_misses=5)
    assert (many.decoded_tokens, many.tokens_per_step, many.records_per_step) == (8, 2, 1.5)
    assert many.decode_tokens_per_second == 2 and many.flash_bytes_per_token == 125_000
    assert "new 11 at 2.0/s (3 sequences, 2.0 tokens of 1.5 rows a step), first" in many.line()
    assert many.to_dict()["tokens_per_step"] == 2
    assert GenerationStats().tokens_per_step == GenerationStats().flash_bytes_per_token == 0


def test_the_line_says_how_many_guesses_were_right() -> None:
    guessed = replace(STATS, drafted_tokens=12, accepted_tokens=9)
    assert "new 11 at 2.5/s (9 of 12 guesses right), first" in guessed.line()


def test_line_begins_with_the_engine() -> None:
    named = replace(STATS, engine="ggml")
    assert named.line() == f"ggml: {STATS.line()}"
    assert json.loads(json.dumps(named.to_dict()))["engine"] == "ggml"


def test_the_line_mentions_a_device_only_if_there_is_one() -> None:
    device = replace(STATS, uploaded_rows=4, uploaded_bytes=1_200_000)
    assert "75% hits, 2.50 MB read from flash, 1.20 MB to the device, 25 ms" in device.line()
    figures = device.to_dict()
    assert (figures["uploaded_rows"], figures["uploaded_bytes"]) == (4, 1_200_000)
    assert STATS.to_dict()["uploaded_bytes"] == 0


def test_what_was_counted_before_a_call_is_not_its_own() -> None:
    class Counted(Rows):
        now = RowCounters(1, 2, 3, 0.5, 6, 7)

        def counters(self) -> RowCounters:
            return self.now

    stats, rows = GenerationStats(), Counted()
    with Recorder(stats, rows):
        rows.now = RowCounters(11, 22, 33, 0.75, 66, 77)
    assert (stats.row_hits, stats.row_misses, stats.flash_bytes) == (10, 20, 30)
    assert stats.stall_seconds == 0.25
    assert (stats.uploaded_rows, stats.uploaded_bytes) == (60, 70)
