"""The tables of `stem-edge bench`."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from stem_edge.measuring.bench_figures import (
    BenchReport,
    Figures,
    OnDevice,
    PhasePeak,
    Settings,
)

# Title, unit, width.
COLUMNS = (
    ("prefill", "tok/s", 9),
    ("decode", "tok/s", 8),
    ("by step", "tok/s", 8),
    ("first", "ms", 8),
    ("load", "s", 7),
    ("+first", "s", 7),
    ("cold", "s", 7),
    ("anon", "MB", 7),
    ("file", "MB", 7),
    ("flash", "B/tok", 8),
    ("hits", "%", 6),
    ("stall", "ms/tok", 7),
)
LEAST_NAME_WIDTH = 20
LEGEND = """\
by step: by the median step; +first: from nothing to a first token; cold: the same, with no file in
the page cache; anon: anonymous memory and swap; file: mapped from files of backbone and tables"""


def table(report: BenchReport) -> str:
    """Everything, for people."""
    lines = [*_head(report), "", *_subjects(report.subjects), LEGEND, "", *_phases(report.subjects)]
    return "\n".join([*lines, *_devices(report.subjects), *_ratios(report), *_bandwidth(report)])


def _head(report: BenchReport) -> Iterator[str]:
    settings = report.settings
    engine = "" if settings.engine == "onnxruntime" else f" on {settings.engine}"
    yield f"{report.machine}, {settings.threads} threads; {report.bundle}{engine}"
    cold = ", tables not in the page cache" if settings.cold else ""
    yield (
        f"prompts of {settings.prompt_tokens}, {settings.new_tokens} steps, "
        f"{settings.rounds} rounds{cold}; {settings.text}"
    )
    if _emulates(settings, report.subjects):
        yield "flash is EMULATED where a profile is named: delays only"


def _emulates(settings: Settings, subjects: dict[str, Figures]) -> bool:
    return "emulate_flash" in settings.options or any(n.startswith("flash=") for n in subjects)


def _subjects(subjects: dict[str, Figures]) -> Iterator[str]:
    width = _name_width(subjects)
    for at in (0, 1):
        yield " " * width + "".join(f"{column[at]:>{column[2]}}" for column in COLUMNS)
    for name, figures in subjects.items():
        cells = zip(_cells(figures), COLUMNS, strict=True)
        yield f"{name:<{width}}" + "".join(f"{cell:>{column[2]}}" for cell, column in cells)


def _name_width(subjects: dict[str, Figures]) -> int:
    return max([LEAST_NAME_WIDTH, *(len(name) + 2 for name in subjects)])


def _cells(figures: Figures) -> Iterator[str]:
    peaks = figures.peak_memory.values()
    mapped = [peak.mapped for peak in peaks if peak.mapped is not None]
    yield _cell(figures.prefill_tokens_per_second, 0)
    yield _cell(figures.decode_tokens_per_second, 1)
    yield _cell(figures.median_step_tokens_per_second, 1)
    yield _cell(figures.first_token_seconds, 0, 1e3)
    yield _cell(figures.load_seconds, 2)
    yield _cell(figures.load_to_first_token_seconds, 2)
    yield _cell(figures.cold_load_to_first_token_seconds, 2)
    yield _cell(max(peak.unevictable for peak in peaks), 0, 1e-6)
    yield _cell(max(mapped, default=None), 0, 1e-6)
    yield _cell(figures.flash_bytes_per_token, 0)
    yield _cell(figures.hit_rate, 1, 100)
    yield _cell(figures.stall_seconds_per_token, 2, 1e3)


def _phases(subjects: dict[str, Figures]) -> Iterator[str]:
    yield "peak memory by phase, anonymous and swap + mapped from backbone and tables, MB"
    for name, figures in subjects.items():
        cells = [f"{phase} {_peak(peak)}" for phase, peak in figures.peak_memory.items()]
        yield f"{name:<{_name_width(subjects)}}{',  '.join(cells)}"


def _peak(peak: PhasePeak) -> str:
    anonymous = _cell(peak.unevictable, 0, 1e-6)
    return anonymous if peak.mapped is None else f"{anonymous} + {_cell(peak.mapped, 0, 1e-6)}"


def _devices(subjects: dict[str, Figures]) -> Iterator[str]:
    found = {name: each.on_device for name, each in subjects.items() if each.on_device}
    if found:
        yield ""
        yield "on devices: memory in MB as planned (of that slots) and as allocated, without weights"
    for name, device in found.items():
        about = ", ".join(f"{key} {value}" for key, value in device.about.items())
        yield f"{name:<{_name_width(subjects)}}{about}"
        if device.planned:
            yield " " * _name_width(subjects) + ", ".join(_on_device(device))


def _on_device(device: OnDevice) -> Iterator[str]:
    planned, slots = _cell(device.planned, 1, 1e-6), _cell(device.row_cache_planned, 1, 1e-6)
    yield f"{planned} ({slots} in {device.slots} slots), {_cell(device.allocated, 1, 1e-6)}"
    if device.driver_says is not None:
        yield f"{_cell(device.driver_says, 0, 1e-6)} in all by the driver"
    yield (
        f"uploads {device.uploaded_rows_per_token:.2f} rows and "
        f"{device.uploaded_bytes_per_token:,.0f} bytes a token "
        f"({device.uploaded_bytes_per_prompt_token:,.0f} of a prompt)"
    )
    if device.host_hit_rate is not None:
        share = f"{device.host_hit_rate:.1%}"
        yield f"host tier of {device.host_slots} records {share} hits"


def _ratios(report: BenchReport) -> Iterator[str]:
    if report.ratios:
        yield ""
    for ratio in report.ratios:
        yield (
            f"bundle / {ratio.against}: {ratio.rate.replace('_', ' ')} {ratio.median:.3f} "
            f"({ratio.least:.3f} to {ratio.most:.3f})"
        )


def _bandwidth(report: BenchReport) -> Iterator[str]:
    rates, nbytes = report.bandwidth, report.token_nbytes
    if not rates or report.bandwidth_reached is None:
        return
    rate = median(rates)
    yield ""
    yield (
        f"memory bandwidth {rate / 1e9:.1f} GB/s ({min(rates) / 1e9:.1f} to "
        f"{max(rates) / 1e9:.1f}); a token reads {nbytes / 1e6:.1f} MB: at most "
        f"{rate / nbytes:.1f} tok/s, {report.bandwidth_reached:.2f} of it reached"
    )


def _cell(value: float | None, digits: int, factor: float = 1) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"
