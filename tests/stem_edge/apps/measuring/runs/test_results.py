"""Arithmetic of results: figures of a run, medians over rounds, ratios within them."""

from __future__ import annotations

import pytest

from stem_edge.apps.measuring.runs.report import report_table
from stem_edge.apps.measuring.runs.results import RATES, Phase, Report, Round, SubjectResult
from stem_edge.apps.measuring.sampler import PhaseMemory
from stem_edge.system.process_memory import Memory

NAMES = ("start", "load", "first", "prompt", "decode")
ROWS = {"hits": 30.0, "misses": 10.0, "bytes_read": 4000.0, "stall_seconds": 0.4, "slots": 64.0}


def run(speed: float = 1.0, peak: int = 100) -> Round:
    """A run of five phases of 1, 2, ... 5 seconds, divided by a speed."""
    counters = {"prompt": {"hits": 10.0}, "decode": ROWS | {"planned": 1e6}}
    phases = [
        Phase(
            name,
            at / speed,
            {"first": 16, "prompt": 100, "decode": 4}.get(name, 0),
            PhaseMemory(Memory(50, 0, backbone=7 + at), peak + at),
            [s / speed for s in (1, 1, 2, 4)],
            counters.get(name, {}),
        )
        for at, name in enumerate(NAMES, 1)
    ]
    return Round(phases)


def report(**subjects: SubjectResult) -> Report:
    return Report("model", "a machine", SETTINGS, subjects)


SETTINGS = {
    "threads": 2, "text": "a text", "prompt_tokens": 100, "new_tokens": 4, "rounds": 3, "cold": False, "options": {}, "device": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("load_seconds", 2),
        ("first_token_seconds", 1 + 2 + 3),
        ("prompt", 100 / 4),
        ("decode", 4 / 8),
        ("median_step", 1 / 1.5),
        ("peak_anonymous", 105),
        ("mapped", 7 + 5),
        ("hit_rate", 20 / 30),
        ("flash_bytes_per_token", 1000),
        ("stall_seconds_per_token", 0.1),
        ("slots", 64),
    ],
)
def test_figures_of_a_run(figure: str, value: float) -> None:
    assert run().figures[figure] == pytest.approx(value)


def test_medians_but_the_greatest_peak() -> None:
    result = SubjectResult([run(1, 100), run(4, 300), run(2, 200)])
    found = result.figures()
    assert found["prompt"] == 50 and found["median_step"] == pytest.approx(2 / 1.5)
    assert found["peak_anonymous"] == 305
    assert SubjectResult().figures() == {}


def test_ratios_are_of_the_same_rounds_and_failures_are_told() -> None:
    other = SubjectResult([run(1), run(1)], "round 3 of 3: x: the system killed it")
    none = SubjectResult([], "round 1 of 3: y: no memory")
    found = report(bundle=SubjectResult([run(2), run(4), run(9)]), other=other, none=none)
    assert found.ratios() == {
        "other": {rate: {"median": 3, "least": 2, "most": 4} for rate in RATES}
    }
    table = report_table(found)
    assert "bundle / other: prompt 3.000" in table and "(2.000 to 4.000)" in table
    assert "failed in round 3 of 3: x: the system killed it" in table
    assert "failed in round 1 of 3: y: no memory" in table
