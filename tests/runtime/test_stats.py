"""Figures of a single call."""

import json

from stem_edge.runtime.stats import GenerationStats

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


def test_dict_has_counts_and_figures_and_survives_json() -> None:
    found = json.loads(json.dumps(STATS.to_dict()))
    assert (found["new_tokens"], found["hit_rate"]) == (11, 0.75)
    assert (found["prefill_tokens_per_second"], found["decode_tokens_per_second"]) == (60, 2.5)


def test_line_for_people() -> None:
    assert STATS.line() == (
        "prompt 30 tokens at 60/s, new 11 at 2.5/s, first after 600 ms; "
        "rows 75% hits, 2.50 MB read from flash, 25 ms stalled"
    )
