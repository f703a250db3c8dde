"""A measurement as a table for people, and as JSON and CSV for machines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict
from statistics import quantiles

from stem_edge.measuring.phases.measurement import Measurement, Phase
from stem_edge.text_table import seconds, table, wrapped
from stem_edge.units import format_rate, format_size

LEAST_STEPS = 10  # fewer cannot tell the slowest tenth
LABELS = {
    "anonymous": "anonymous",
    "swap": "swap",
    "backbone": "mapped: backbone",
    "tables": "mapped: tables",
    "libraries": "mapped: libraries",
    "other_files": "mapped: other files",
    "shared": "shared",
}
# Words that --explain explains after the kinds of memory, whose meaning depends on the system.
EXPLAINED = {
    "phases": "start: Python alone; import: stem-edge and what it needs; load: the bundle; "
    "prefill: the prompt, up to the choice of a first token; decode: the tokens that follow in "
    "the text, one by one, each with the choice of a next one. Memory is at the end of each",
    "backbone": "all weights except for the tables; they are quantized",
    "tables": "one row a layer for each token of the vocabulary; they stay on flash (any disk), and "
    "a token whose rows are not in the row cache reads them there (together: a record)",
    "KV cache": "keys and values of the tokens so far",
    "row cache": "slots in memory for rows of tokens used before; only filled ones are counted. Some "
    "are filled while loading, from counts of text or of earlier runs (--no-warm-start: none)",
    "resident": "everything in memory, as tools like top show it; most mapped pages could be dropped",
    "peak": "the most anonymous memory and swap at any moment of a phase, which a device must have, "
    "and which --memory limits",
    "page cache": "pages of the bundle's files that the system keeps, whoever read them, and may "
    "drop. Rows that are read from flash pass through it",
    "GPU memory": "of this process, as the driver reports it; shown if a GPU is used",
    "load and prefill": "their times together; with start and import, the time from nothing to a "
    "first token",
    "by median step": "1 / median time of a decode step, which leaves out what else the machine "
    "did; the line above is tokens / time of all steps",
    "hit rate": "share of tokens whose rows were in the row cache when they were needed",
    "stall": "time that a decoded token waited for rows, on average",
    "predicted": "from sizes and the memory plan; of the speed, what the bandwidth of memory, timed "
    "before and after the run, allows at most; the difference is relative to what was measured",
    "checks": "the sum of all kinds against the system's own sum; the greatest resident size that "
    "was sampled against the kernel's own record of it (the high-water mark)",
    "real, emulated": "limits of a device: the system enforces real ones; emulated ones are delays, "
    "or a smaller plan, which nothing enforces",
}


def to_dict(found: Measurement) -> dict[str, object]:
    """Return everything measured, for JSON. Sizes in bytes, times in seconds."""
    plain, work = asdict(found), found.workload
    del plain["round"]
    workload = {
        "source": work.source,
        "prompt_tokens": len(work.prompt),
        "new_tokens": len(work.following),
    }
    return plain | {
        "workload": workload,
        "steps": found.steps,
        "counters": found.counters,
        "figures": figures(found),
    }


def figures(found: Measurement) -> dict[str, float | None]:
    """Return the main figures of a run."""
    speed = found.speed
    return {
        "peak_unevictable": found.peak,
        "mapped": found.mapped,
        "prefill_tokens_per_second": speed.prefill_tokens_per_second,
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "median_step_tokens_per_second": speed.median_step_tokens_per_second,
        "load_and_prefill_seconds": found.phase("load").seconds + found.phase("prefill").seconds,
        "hit_rate": speed.hit_rate,
        "flash_bytes_per_token": speed.flash_bytes_per_token,
        "stall_seconds_per_token": speed.stall_seconds_per_token,
        "network_bytes_per_token": speed.network_bytes_per_token,
        "sampler_saw": found.sampler_saw,
        "accounted": accounted(found),
    }


def accounted(found: Measurement) -> float:
    """Return the sum of all kinds over the kernel's resident size, in the phase that differs most."""
    shares = [phase.memory.at_end.resident / phase.memory.resident_at_end for phase in found.phases]
    return max(shares, key=lambda share: abs(share - 1))


def to_csv(found: Measurement) -> str:
    """Return a line for each phase. Sizes in bytes, times in seconds."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _csv_row(found.phases[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_csv_row, found.phases))
    return out.getvalue()


def _csv_row(phase: Phase) -> dict[str, object]:
    row = asdict(phase)
    memory = row.pop("memory")
    kinds = memory.pop("at_end") | {"resident": phase.memory.at_end.resident}
    del memory["resident_at_end"]
    return {"phase": row.pop("name"), **kinds, **memory, **row}


def report_table(found: Measurement) -> str:
    """Return the report for people, 80 columns wide."""
    sections = [_head(found), _phases(found), _speed(found), _predicted(found), _checks(found)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def explanation(found: Measurement) -> str:
    """Explain every word of the table, as it applies to this system."""
    kinds = {LABELS[name]: text for name, text in found.definitions.items()}
    lines = [f"{name}: {text}." for name, text in (kinds | EXPLAINED).items()]
    return "\n".join(part for line in lines for part in wrapped(line, "  "))


def _head(found: Measurement) -> list[str]:
    work = found.workload
    lines = [
        found.bundle,
        f"{work.source}: prompt of {len(work.prompt)} tokens, {len(work.following)} decoded",
        f"{found.system}, {found.threads} threads, context of {found.context_length} tokens",
    ]
    if found.runs_on:
        lines.append(", ".join(f"{key} {value}" for key, value in found.runs_on.items()))
    if found.preparing is not None:
        lines.append(f"a first load prepared it in {found.prepared_seconds:.0f} s; expected:")
        lines.append(f"  {found.preparing}")
    if found.device is not None:
        lines.append(f"on {found.device.name} ({found.device.what}):")
        lines += [f"  {limit.what + ':':<8}{limit.how}; {limit.words}" for limit in found.limits]
    return lines


def _phases(found: Measurement) -> list[str]:
    def sizes(label: str, value: Callable[[Phase], int | None]) -> list[tuple[str, ...]]:
        """Return a row, or none if there is nothing to show, or the system does not tell the kind."""
        values = [value(phase) for phase in found.phases]
        if not any(values) and (values[0] == 0 or label in LABELS.values()):
            return []
        return [(label, *("?" if v is None else format_size(v) for v in values))]

    rows = [
        ("", *(phase.name for phase in found.phases)),
        ("time", *(seconds(phase.seconds) for phase in found.phases)),
    ]
    for kind, label in LABELS.items():
        rows += sizes(label, lambda phase, kind=kind: getattr(phase.memory.at_end, kind))  # type: ignore[misc]
        if kind == "anonymous":
            rows += sizes("  in it: KV cache", lambda phase: phase.kv_cache)
            rows += sizes("  in it: row cache", lambda phase: phase.row_cache)
    rows += sizes("resident, together", lambda phase: phase.memory.at_end.resident)
    rows += sizes("peak, anon. and swap", lambda phase: phase.memory.peak_unevictable)
    rows += sizes("GPU memory", lambda phase: phase.device)
    rows += sizes("page cache: backbone", lambda phase: phase.cached_backbone)
    rows += sizes("page cache: tables", lambda phase: phase.cached_tables)
    return table(rows)


def _speed(found: Measurement) -> list[str]:
    speed, slots = found.speed, int(found.counters["slots"])
    filled = int(found.round.before["filled_slots"])
    to_first = found.phase("load").seconds + found.phase("prefill").seconds
    by_step = format_rate(speed.median_step_tokens_per_second)
    rows = [
        ("prefill", f"{format_rate(speed.prefill_tokens_per_second)} tokens/s"),
        ("decode", f"{format_rate(speed.decode_tokens_per_second)} tokens/s"),
        ("  by median step", f"{by_step} tokens/s{_slow(found.steps)}"),
        ("load and prefill", f"{to_first:.3g} s"),
    ]
    if speed.hit_rate is not None:
        flash = format_size(speed.flash_bytes_per_token or 0)
        stall = (speed.stall_seconds_per_token or 0) * 1e3
        rows += [
            ("row cache", f"hit rate {speed.hit_rate:.1%} while decoding"),
            ("  filled at load", f"{filled:,} of {slots:,} slots"),
            ("from flash", f"{flash} a decoded token, stall {stall:.2g} ms"),
        ]
    if speed.network_bytes_per_token:
        far = format_size(speed.network_bytes_per_token)
        rows.append(("from the network", f"{far} a decoded token, which the prediction leaves out"))
    return table(rows, "l")


def _slow(steps: list[float]) -> str:
    if len(steps) < LEAST_STEPS:
        return ""
    slow = quantiles(steps, n=10, method="inclusive")[-1]
    return f"; 1 in 10 takes over {slow * 1e3:.3g} ms"


def _predicted(found: Measurement) -> list[str]:
    expected, speed = found.prediction, found.decode_tokens_per_second
    # Speed on an accelerator cannot be compared, because the prediction is for memory of the CPU.
    elsewhere = found.runs_on.get("provider", "cpu") != "cpu"
    known = None if elsewhere or len(found.steps) < LEAST_STEPS else speed
    hits: Callable[[float], str] = "{:.1%}".format
    values: list[tuple[str, float | None, float, Callable[[float], str]]] = [
        ("peak, anon. and swap", found.peak, expected.anonymous, format_size),
        ("mapped: backbone", found.mapped, expected.mapped, format_size),
        ("median step, tokens/s", known, expected.decode_tokens_per_second, format_rate),
        ("hit rate", found.hit_rate, expected.hit_rate, hits),
    ]
    rows = [("", "measured", "predicted", "difference")]
    for name, value, other, words in values:
        if value is not None:
            difference = f"{other / value - 1:+.1%}" if value else ""
            rows.append((name, words(value), words(other), difference))
    return table(rows)


def _checks(found: Measurement) -> list[str]:
    lines = [f"Needs {format_size(found.peak)} of RAM that cannot be reclaimed."]
    if found.mapped:
        lines += [
            f"In addition, {format_size(found.mapped)} of weights are mapped: fast while they stay",
            "in memory, read again if they were dropped.",
        ]
    lines += [
        f"checks: the kinds add up to {accounted(found):.1%} of what the system counts as",
        f"resident; samples every {found.interval * 1e3:.3g} ms",
    ]
    if found.sampler_saw is not None:
        lines[-1] += f" saw {found.sampler_saw:.1%} of the kernel's mark"
    return [*lines, "--explain says what every word means"]
