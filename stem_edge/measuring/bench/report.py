"""Tables of `stem-edge bench`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from stem_edge.measuring.bench.figures import BenchReport, Figures, OnDevice
from stem_edge.text_table import table, wrapped
from stem_edge.units import format_size

# Title, unit, name in the figures, digits, factor from the figure to the unit.
COLUMNS = (
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


def report_table(report: BenchReport) -> str:
    """Return the report for people."""
    subjects = report.subjects
    titles, units, *_ = zip(*COLUMNS, strict=True)
    rows = [("", *titles), ("", *units), *((n, *_cells(each)) for n, each in subjects.items())]
    measured = [column for column in zip(*rows, strict=True) if any(column[2:])]
    sections = [
        _head(report),
        [*table(list(zip(*measured, strict=True))), LEGEND],
        [PEAKS, *table([(name, _phases(each)) for name, each in subjects.items()], "l")],
        _devices(subjects),
        [f"failed in {why}" for why in report.failed.values()],
        _ratios(report),
        _bandwidth(report),
    ]
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))


def _head(report: BenchReport) -> Iterator[str]:
    settings = report.settings
    engine = "" if settings.engine == "onnxruntime" else f" on {settings.engine}"
    yield f"{report.machine}, {settings.threads} threads; {report.bundle}{engine}"
    cold = ", tables not in the page cache" if settings.cold else ""
    if settings.limit is not None:
        size = format_size(settings.limit)
        yield f"each loaded anew in each round, in a cgroup of {size}, no file in the page cache"
    yield (
        f"prompts of {settings.prompt_tokens}, {settings.new_tokens} steps, "
        f"{settings.rounds} rounds{cold}; {settings.text}"
    )
    if "emulate_flash" in settings.options or any(n.startswith("flash=") for n in report.subjects):
        yield "flash is EMULATED where a profile is named, by delays only"


def _cells(figures: Figures) -> list[str]:
    peaks = figures.peak_memory.values()
    values = vars(figures) | {
        "anonymous": max(peak.unevictable for peak in peaks),
        "mapped": max((peak.mapped for peak in peaks if peak.mapped is not None), default=None),
        "slots": figures.slots or None,  # no cell rather than 0 for a dense model
    }
    return [
        "" if (value := values[name]) is None else f"{value * factor:,.{digits}f}"
        for _, _, name, digits, factor in COLUMNS
    ]


def _phases(figures: Figures) -> str:
    words = []
    for phase, peak in figures.peak_memory.items():
        mapped = "" if peak.mapped is None else f" + {peak.mapped / 1e6:,.0f}"
        words.append(f"{phase} {peak.unevictable / 1e6:,.0f}{mapped}")
    return ",  ".join(words)


def _devices(subjects: dict[str, Figures]) -> list[str]:
    found = {name: each.on_device for name, each in subjects.items() if each.on_device}
    if not found:
        return []
    lines = ["on devices: memory planned (slots thereof), and allocated without weights"]
    for name, device in found.items():
        lines.append(f"{name}: {', '.join(f'{key} {word}' for key, word in device.about.items())}")
        if device.planned:
            lines += wrapped("  " + ", ".join(_on_device(device)), "  ")
    return lines


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
    if device.host_hit_rate is not None:
        yield f"host tier of {device.host_slots:,} records {device.host_hit_rate:.1%} hits"


def _ratios(report: BenchReport) -> Iterator[str]:
    for ratio in report.ratios:
        yield (
            f"bundle / {ratio.against}: {ratio.rate.replace('_', ' ')} {ratio.median:.3f} "
            f"({ratio.least:.3f} to {ratio.most:.3f})"
        )
    if any(name.startswith(OTHER_WEIGHTS) for name in report.subjects):
        yield from wrapped(NO_COMPARISON, "")


def _bandwidth(report: BenchReport) -> Iterator[str]:
    rates, nbytes = report.bandwidth, report.token_nbytes
    if not rates or report.bandwidth_reached is None:
        return
    rate = median(rates)
    yield (
        f"memory bandwidth {rate / 1e9:.1f} GB/s ({min(rates) / 1e9:.1f} to "
        f"{max(rates) / 1e9:.1f}); a token reads {format_size(nbytes)}: at most "
        f"{rate / nbytes:.1f} tok/s, {report.bandwidth_reached:.2f} of it reached"
    )
