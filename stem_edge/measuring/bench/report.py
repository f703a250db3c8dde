"""Tables of `stem-edge bench`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from stem_edge.measuring.bench.cases import ALLOWED, FIRST, PLAIN, RATE, STEP, CaseResult
from stem_edge.measuring.bench.figures import Figures, OnDevice, Report
from stem_edge.text_table import table, wrapped
from stem_edge.units import format_size

# Title, unit, name in the figures, digits, factor from the figure to the unit.
Column = tuple[str, str, str, int, float]
COLUMNS: tuple[Column, ...] = (
    ("prefill", "tok/s", "prefill_tokens_per_second", 0, 1),
    ("decode", "tok/s", "decode_tokens_per_second", 1, 1),
    ("by step", "tok/s", "median_step_tokens_per_second", 1, 1),
    ("first", "ms", "first_token_seconds", 0, 1e3),
    ("load", "s", "load_seconds", 2, 1),
    ("+first", "s", "load_to_first_token_seconds", 2, 1),
    ("cold", "s", "cold_load_to_first_token_seconds", 2, 1),
    ("anon", "MB", "anonymous", 0, 1e-6),
    ("file", "MB", "mapped", 0, 1e-6),
    ("flash", "B/tok", "flash_bytes_per_token", 0, 1),
    ("stall", "ms/tok", "stall_seconds_per_token", 2, 1e3),
    ("hits", "%", "hit_rate", 1, 100),
    ("slots", "", "slots", 0, 1),
)
LEGEND = """\
by step: by the median step; +first: from nothing to a first token; cold: +first with no file in the
page cache; anon: anonymous memory and swap; file: mapped from files of backbone and tables;
slots: records that the row cache can hold"""
OTHER_WEIGHTS = "llama.cpp"
NO_COMPARISON = (
    "These are speeds, not a comparison: llama.cpp has weights of its own, and how far each side is "
    "from the checkpoint is not measured here. Compare types of the same divergence "
    "(tools/experiments/quality_table.py)."
)
PEAKS = "peak memory by phase, anonymous and swap + mapped from backbone and tables, MB"
SEQUENCES: tuple[Column, ...] = (
    ("together", "tok/s", RATE, 1, 1),
    ("first", "ms", FIRST, 0, 1e3),
    ("longest wait", "ms", "longest_wait_seconds", 0, 1e3),
    ("distinct", "/step", "distinct_rows_per_step", 2, 1),
    ("distinct", "/token", "distinct_rows_per_token", 3, 1),
    ("read", "/token", "rows_read_per_token", 3, 1),
    ("flash", "B/token", "flash_bytes_per_token", 0, 1),
    ("anon", "MB", "anonymous", 0, 1e-6),
)
SEQUENCES_LEGEND = """\
together: all decode; gain: over one sequence, in the same round; first: to the first token of a
prompt, while one fewer decode; x alone: over that with nothing else; longest wait: of those that
decode, meanwhile; distinct: rows that the tokens look up; read: those that the row cache lacked;
anon: peak of anonymous memory and swap"""
SPECULATION: tuple[Column, ...] = (
    ("speed", "tok/s", RATE, 1, 1),
    ("guessed", "/token", "drafted_per_token", 2, 1),
    ("right", "%", "accepted_share", 0, 100),
    ("differ", "", "different", 0, 1),
)
SPECULATION_LEGEND = """\
/ plain: speed over that without guesses, in the same round; guessed: tokens for each of the answer;
differ: places where the most probable token is another one than without guesses"""


def report_table(report: Report) -> str:
    """Return the report for people."""
    if not report.results:
        sections = _one_at_a_time(report)
    elif any(one.way for one in report.results):
        sections = _speculation(report)
    else:
        sections = _sequences(report)
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))


def _grid(
    labels: Sequence[str],
    columns: Sequence[Column],
    rows: Sequence[tuple[Sequence[str], Mapping[str, float | None]]],
    align: str = "lr",
) -> list[str]:
    """Return a table with these labels before the figures that were measured."""

    def cell(value: float | None, digits: int, unit: float) -> str:
        return "" if value is None else f"{value * unit:,.{digits}f}"

    titles, units, *_ = zip(*columns, strict=True)
    lines = [(*labels, *titles), (*[""] * len(labels), *units)]
    for before, figures in rows:
        cells = (cell(figures.get(name), digits, unit) for *_, name, digits, unit in columns)
        lines.append((*before, *cells))
    measured = [column for column in zip(*lines, strict=True) if any(column[2:])]
    return table(list(zip(*measured, strict=True)), align)


def _head(report: Report, work: str, *more: str) -> list[str]:
    """Return the lines above a table. work: what was run, in words."""
    settings = report.settings
    return [
        f"{report.machine}, {settings.threads} threads; {report.bundle} on {settings.engine}",
        *more,
        f"{work}, {settings.rounds} rounds{', tables not in the page cache' * settings.cold}; "
        + settings.text,
    ]


def _one_at_a_time(report: Report) -> Iterator[Sequence[str] | Iterator[str]]:
    settings, subjects = report.settings, report.subjects
    size = "" if settings.limit is None else format_size(settings.limit)
    anew = f"each loaded anew in each round, in a cgroup of {size}, no file in the page cache"
    work = f"prompts of {settings.prompt_tokens}, {settings.new_tokens} steps"
    head = _head(report, work, *[anew] * bool(size))
    if "emulate_flash" in settings.options or any(n.startswith("flash=") for n in subjects):
        head.append("flash is EMULATED where a profile is named, by delays only")
    yield head
    rows = [((name,), _values(each)) for name, each in subjects.items()]
    yield [*_grid(("",), COLUMNS, rows), LEGEND]
    yield [PEAKS, *table([(name, _phases(each)) for name, each in subjects.items()], "l")]
    yield _devices(subjects)
    yield [f"failed in {why}" for why in report.failed.values()]
    yield _ratios(report)
    yield _bandwidth(report)


def _values(figures: Figures) -> dict[str, float | None]:
    peaks = figures.peak_memory.values()
    return vars(figures) | {
        "anonymous": max(peak.unevictable for peak in peaks),
        "mapped": max((peak.mapped for peak in peaks if peak.mapped is not None), default=None),
        "slots": figures.slots or None,  # no cell rather than 0 for a dense model
    }


def _phases(figures: Figures) -> str:
    words = []
    for phase, peak in figures.peak_memory.items():
        mapped = "" if peak.mapped is None else f" + {peak.mapped / 1e6:,.0f}"
        words.append(f"{phase} {peak.unevictable / 1e6:,.0f}{mapped}")
    return ",  ".join(words)


def _devices(subjects: dict[str, Figures]) -> Iterator[str]:
    found = {name: each.on_device for name, each in subjects.items() if each.on_device}
    if found:
        yield "on devices: memory planned (slots thereof), and allocated without weights"
    for name, device in found.items():
        yield f"{name}: {', '.join(f'{key} {word}' for key, word in device.about.items())}"
        if device.planned:
            yield from wrapped("  " + ", ".join(_on_device(device)), "  ")


def _on_device(device: OnDevice) -> Iterator[str]:
    slots = f"{format_size(device.row_cache_planned)} in {device.slots:,} slots"
    yield f"{format_size(device.planned)} ({slots}), {format_size(device.allocated)}"
    if device.driver_says is not None:
        yield f"{format_size(device.driver_says)} in all by the driver"
    yield (
        f"uploads {device.uploaded_rows_per_token:.2f} rows and "
        f"{format_size(device.uploaded_bytes_per_token)} a token "
        f"({format_size(device.uploaded_bytes_per_prompt_token)} of a prompt)"
    )


def _ratios(report: Report) -> Iterator[str]:
    for ratio in report.ratios:
        yield (
            f"bundle / {ratio.against}: {ratio.rate.replace('_', ' ')} {ratio.median:.3f} "
            f"({ratio.least:.3f} to {ratio.most:.3f})"
        )
    if any(name.startswith(OTHER_WEIGHTS) for name in report.subjects):
        yield from wrapped(NO_COMPARISON, "")


def _bandwidth(report: Report) -> Iterator[str]:
    rates, nbytes = report.bandwidth, report.token_nbytes
    if not rates or report.bandwidth_reached is None:
        return
    rate = median(rates)
    yield (
        f"memory bandwidth {rate / 1e9:.1f} GB/s ({min(rates) / 1e9:.1f} to "
        f"{max(rates) / 1e9:.1f}); a token reads {format_size(nbytes)}: at most "
        f"{rate / nbytes:.1f} tok/s, {report.bandwidth_reached:.2f} of it reached"
    )


def _sequences(report: Report) -> Iterator[Sequence[str] | Iterator[str]]:
    prompt, new = report.settings.prompt_tokens, report.settings.new_tokens
    yield _head(report, f"prompts of {prompt}, {new} tokens of each while all decode")
    rows = [
        (
            (one.subject, one.case, *(f"{one.ratios[n].median:.2f}" for n in ("gain", "first"))),
            one.figures,
        )
        for one in report.results
    ]
    yield [*_grid(("", "sequences", "gain", "x alone"), SEQUENCES, rows), SEQUENCES_LEGEND]
    yield _gains(report.results)


def _gains(results: Sequence[CaseResult]) -> Iterator[str]:
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


def _speculation(report: Report) -> Iterator[Sequence[str] | Iterator[str]]:
    prompt, new = report.settings.prompt_tokens, report.settings.new_tokens
    yield _head(report, f"prompts of up to {prompt}, answers of up to {new}")
    rows = [
        (
            (one.case, one.subject, one.way, "" if one.way == PLAIN else str(one.ratios[PLAIN])),
            one.figures,
        )
        for one in report.results
    ]
    grid = _grid(("", "", "", "/ plain"), SPECULATION, rows, "lllr")
    yield [*grid, SPECULATION_LEGEND, *_allowed(report.results)]


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
