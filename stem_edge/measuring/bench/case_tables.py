"""Tables of `stem-edge bench --cases`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stem_edge.measuring.bench.cases import (
    ALLOWED,
    FIRST,
    PLAIN,
    RATE,
    STEP,
    CaseReport,
    CaseResult,
)
from stem_edge.text_table import table

# Title, unit, name in figures, digits, factor from the figure to the unit.
SEQUENCES = (
    ("together", "tok/s", RATE, 1, 1.0),
    ("first", "ms", FIRST, 0, 1e3),
    ("longest wait", "ms", "longest_wait_seconds", 0, 1e3),
    ("distinct", "/step", "distinct_rows_per_step", 2, 1.0),
    ("distinct", "/token", "distinct_rows_per_token", 3, 1.0),
    ("read", "/token", "rows_read_per_token", 3, 1.0),
    ("flash", "B/token", "flash_bytes_per_token", 0, 1.0),
    ("anon", "MB", "anonymous", 0, 1e-6),
)
SEQUENCES_LEGEND = """\
together: all decode; gain: over one sequence, in the same round; first: to the first token of a
prompt, while one fewer decode; x alone: over that with nothing else; longest wait: of those that
decode, meanwhile; distinct: rows that the tokens look up; read: those that the row cache lacked;
anon: peak of anonymous memory and swap"""
SPECULATION = (
    ("tok/s", RATE, 1, 1.0),
    ("guessed", "drafted_per_token", 2, 1.0),
    ("right %", "accepted_share", 0, 100.0),
    ("differ", "different", 0, 1.0),
)
SPECULATION_LEGEND = """\
/ plain: speed over that without guesses, in the same round; guessed: tokens for each of the answer;
differ: places where the most probable token is another one than without guesses"""


def case_table(report: CaseReport) -> str:
    """Return the report for people."""
    ways = any(one.way for one in report.results)
    return speculation_table(report) if ways else sequences_table(report)


def sequences_table(report: CaseReport) -> str:
    """Return the report on several sequences."""
    prompt, new = report.settings.prompt_tokens, report.settings.new_tokens
    head = _head(report, f"prompts of {prompt}, {new} tokens of each while all decode")
    titles, units, *_ = zip(*SEQUENCES, strict=True)
    rows = [("", "sequences", "gain", "x alone", *titles), ("", "", "", "", *units)]
    for one in report.results:
        ratios = (f"{one.ratios[name].median:.2f}" for name in ("gain", "first"))
        cells = [_cell(one, name, digits, unit) for *_, name, digits, unit in SEQUENCES]
        rows.append((one.subject, one.case, *ratios, *cells))
    measured = [column for column in zip(*rows, strict=True) if any(column[2:])]
    lines = table(list(zip(*measured, strict=True)))
    return "\n".join([*head, "", *lines, SEQUENCES_LEGEND, "", *_ratios(report.results)])


def _ratios(results: Sequence[CaseResult]) -> Iterator[str]:
    for one in results:
        if one.case != "1":
            yield f"{one.subject}: {one.case} sequences / 1: {one.ratios['gain']}"
        if "allowed" in one.ratios:
            yield (
                f"  of the {one.figures[ALLOWED]:.2f} that the cost of a step of {one.case} tokens "
                f"allows: {one.ratios['allowed']}"
            )
    for one in results:
        if "bundle" in one.ratios:
            many = "1 sequence" if one.case == "1" else f"{one.case} sequences"
            yield f"bundle / {one.subject}, {many}: {one.ratios['bundle']}"


def speculation_table(report: CaseReport) -> str:
    """Return the report on speculation."""
    prompt, new = report.settings.prompt_tokens, report.settings.new_tokens
    head = _head(report, f"prompts of up to {prompt}, answers of up to {new}")
    rows = [("", "", "", *(title for title, *_ in SPECULATION), "/ plain", "")]
    for one in report.results:
        cells = [_cell(one, name, digits, unit) for _, name, digits, unit in SPECULATION]
        ratio = one.ratios[PLAIN]
        spread = (f"{ratio.median:.2f}", f"({ratio.least:.2f} to {ratio.most:.2f})")
        rows.append((one.case, one.subject, one.way, *cells, *(spread if one.way != PLAIN else ())))
    lines = [*head, "", *table(rows, "lllr"), SPECULATION_LEGEND, *_allowed(report.results)]
    return "\n".join(lines)


def _allowed(results: Sequence[CaseResult]) -> Iterator[str]:
    """Say what steps of several tokens cost, which bounds the speed with only right guesses."""
    for name in dict.fromkeys(one.subject for one in results):
        costs = {
            int(figure.removeprefix(STEP)): cost
            for one in results
            for figure, cost in one.figures.items()
            if one.subject == name and figure.startswith(STEP)
        }
        if costs:
            sizes = ", ".join(map(str, costs))
            times = ", ".join(f"{cost:.2f}" for cost in costs.values())
            most = max(size / cost for size, cost in costs.items())
            yield (
                f"{name}: steps of {sizes} tokens take {times} times that of one; with right "
                f"guesses only, at most {most:.2f} times as fast"
            )


def _head(report: CaseReport, work: str) -> list[str]:
    """Return the lines above a table. work: what was run, in words."""
    settings = report.settings
    engine = "" if settings.engine == "onnxruntime" else f" on {settings.engine}"
    return [
        f"{report.machine}, {settings.threads} threads; {report.bundle}{engine}",
        f"{work}, {settings.rounds} rounds; {settings.text}",
    ]


def _cell(result: CaseResult, name: str, digits: int, unit: float) -> str:
    """Format a figure; empty if there is none."""
    value = result.figures.get(name)
    return "" if value is None else f"{value * unit:,.{digits}f}"
