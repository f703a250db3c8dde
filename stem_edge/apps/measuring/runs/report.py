"""A measurement as tables for people, and as JSON for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from stem_edge.apps.measuring.runs.results import Phase, Report
from stem_edge.shown import format_size
from stem_edge.text_table import seconds, table, wrapped

LABELS = {
    "anonymous": "anonymous",
    "swap": "swap",
    "backbone": "mapped: backbone",
    "libraries": "mapped: libraries",
    "other_files": "mapped: other files",
    "shared": "shared",
}
# Title, unit, name of the metric, digits, factor from the metric to the unit.
COLUMNS = (
    ("prompt", "tok/s", "prompt", 0, 1.0),
    ("decode", "tok/s", "decode", 1, 1.0),
    ("by step", "tok/s", "median_step", 1, 1.0),
    ("load", "s", "load_seconds", 2, 1.0),
    ("first", "s", "first_token_seconds", 2, 1.0),
    ("anon", "MB", "peak_anonymous", 0, 1e-6),
    ("file", "MB", "mapped", 0, 1e-6),
    ("flash", "B/tok", "flash_bytes_per_token", 0, 1.0),
    ("stall", "ms/tok", "stall_seconds_per_token", 2, 1e3),
    ("hits", "%", "hit_rate", 1, 100.0),
    ("slots", "", "slots", 0, 1.0),
)
LEGEND = (
    "medians over the rounds; by step: by the median step; first: from nothing to a first token; anon: "
    "peak of anonymous memory and swap; file: mapped from the backbone; slots: records that "
    "the row cache holds"
)
NO_COMPARISON = (
    "These are speeds alone: llama.cpp has weights of its own. `stem-edge eval BUNDLE FILE.gguf --against "
    "CHECKPOINT --text FILE` measures how far each side is from the checkpoint."
)


def to_dict(report: Report) -> dict[str, object]:
    figures = {name: result.figures() for name, result in report.subjects.items()}
    per_round = {
        name: [each.figures for each in result.rounds] for name, result in report.subjects.items()
    }
    derived = {"figures": figures, "rounds": per_round, "ratios": report.ratios()}
    return derived | asdict(report)


def report_table(report: Report) -> str:
    sections = [_head, _phases, _subjects, _ratios, _end]
    texts = ("\n".join(section(report)) for section in sections)
    return "\n\n".join(text for text in texts if text)


def _head(report: Report) -> Iterator[str]:
    settings = report.settings
    yield report.bundle
    yield f"{report.machine}, {settings['threads']} threads"
    cold = ", no file in the page cache" * settings["cold"]
    yield (
        f"{settings['text']}: prompt of {settings['prompt_tokens']} tokens, "
        f"{settings['new_tokens']} decoded; {settings['rounds']} round{'s' * (settings['rounds'] > 1)}{cold}"
    )
    if "provider" in settings["options"]:
        yield f"provider {settings['options']['provider']}"


def _phases_of_bundle(report: Report) -> list[Phase]:
    return next(iter(report.subjects.values())).rounds[-1].phases


def _phases(report: Report) -> list[str]:
    """Return a table of the bundle's last round: time, and memory at the end of each phase."""
    phases = _phases_of_bundle(report)

    def sizes(label: str, value: Callable[[Phase], float | None]) -> list[tuple[str, ...]]:
        values = [value(phase) for phase in phases]
        if not any(values):
            return []
        return [(label, *("?" if v is None else format_size(int(v)) for v in values))]

    rows = [
        ("last round", *(phase.name for phase in phases)),
        ("time", *(seconds(phase.seconds) for phase in phases)),
    ]
    for kind, label in LABELS.items():
        rows += sizes(label, lambda phase, kind=kind: getattr(phase.memory.at_end, kind))  # type: ignore[misc]
        if kind == "anonymous":
            rows += sizes("  in it: KV cache", lambda one: one.counters.get("kv_nbytes", 0))
            rows += sizes("  in it: row cache", lambda one: one.counters.get("row_cache_nbytes", 0))
    rows += sizes("peak, anon. and swap", lambda phase: phase.memory.peak_unevictable)
    return table(rows)


def _subjects(report: Report) -> list[str]:
    """Return a table with the metrics of each bundle and GGUF file, without empty columns."""
    figures = {name: result.figures() for name, result in report.subjects.items()}
    columns = [c for c in COLUMNS if any(c[2] in of for of in figures.values())]
    rows = [("", *(title for title, *_ in columns)), ("", *(unit for _, unit, *_ in columns))]
    for name, of in figures.items():
        cells = (
            f"{of[figure] * factor:,.{digits}f}" if figure in of else ""
            for *_, figure, digits, factor in columns
        )
        rows.append((Path(name).name, *cells))
    return [*table(rows), *wrapped(LEGEND)]


def _ratios(report: Report) -> Iterator[str]:
    for name, rates in report.ratios().items():
        spreads = (f"{rate.replace('_', ' ')} {s['median']:.3f}" for rate, s in rates.items())
        least, most = (f"{rates['median_step'][end]:.3f}" for end in ("least", "most"))
        yield f"bundle / {Path(name).name}: {', '.join(spreads)} ({least} to {most})"
    if any(name.partition(",")[0].endswith(".gguf") for name in report.subjects):
        yield from wrapped(NO_COMPARISON)
    yield from (f"failed in {r.failed}" for r in report.subjects.values() if r.failed)


def _end(report: Report) -> Iterator[str]:
    figures = next(iter(report.subjects.values())).figures()
    planned = int(_phases_of_bundle(report)[-1].counters["planned"])
    yield (
        f"needs {format_size(int(figures['peak_anonymous']))} of RAM that cannot be reclaimed "
        f"(planned for a full context: at most {format_size(planned)})"
    )
