"""A measurement as a table for people, and as JSON and CSV for machines."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from statistics import quantiles

from stem_edge.measuring.measurement import Measurement, Phase
from stem_edge.units import format_rate, format_size

LEAST_STEPS = 10  # to speak of one in ten
LABELS = {
    "anonymous": "anonymous",
    "swap": "swap",
    "backbone": "mapped: backbone",
    "tables": "mapped: tables",
    "libraries": "mapped: libraries",
    "other_files": "mapped: other files",
    "shared": "shared",
}
# What --explain says beside the definitions of the kinds of memory, which depend on the system.
EXPLAINED = {
    "phases": "start: Python alone; import: of stem-edge and what it needs; load: of the bundle; "
    "prefill: the prompt, up to the choice of a first token; decode: the tokens that follow in "
    "the text, one by one, each with the choice of a next one. Memory is that at the end of each",
    "backbone": "all weights but the tables; they are quantized",
    "tables": "one row a layer for each token of the vocabulary; they stay on flash, which is any "
    "disk, and a token reads its rows (together: a record) when it is not in the row cache",
    "KV cache": "keys and values of the tokens so far; it grows in steps",
    "row cache": "slots in memory with rows of tokens used before; counted are those filled. Some "
    "are filled while loading, from counts of text or of earlier runs (--no-warm-start: none)",
    "resident": "all that is in memory, which tools like top show; most of what is mapped could go",
    "peak": "the most anonymous memory and swap at any moment of a phase: what a device must have, "
    "and what --memory limits",
    "page cache": "what the system holds of the bundle's files, whoever read them; it is free to "
    "drop it. Rows that are read from flash pass through it",
    "GPU memory": "of this process, as the driver says; shown if a GPU is used",
    "load and prefill": "their times together; with start and import, the time from nothing to a "
    "first token",
    "by median step": "1 / median time of a decode step: without what else the machine did; the "
    "line above is tokens / time of all steps",
    "hit rate": "share of tokens whose rows were in the row cache when they were needed",
    "stall": "time that a decoded token waited for rows, on average",
    "predicted": "from sizes, the memory plan, and the speed of this machine's kernels, timed "
    "before and after the run, without the model; the difference is relative to what was measured. "
    "Steps of less than a millisecond vary by half from run to run",
    "checks": "resident by kind against the system's own sum; the greatest resident size that was "
    "sampled against the one that the kernel noted itself (the high-water mark)",
    "real, emulated": "of a device: real limits are enforced by the system; emulated ones are "
    "delays, or a smaller plan, which nothing enforces",
}


def to_dict(found: Measurement) -> dict[str, object]:
    """All figures, for JSON. Sizes in bytes, times in seconds."""
    plain = {
        name: getattr(found, name)
        for name in ("bundle", "engine", "system", "threads", "context_length", "interval", "steps")
    }
    return plain | {
        "options": dict(found.options),
        "runs_on": found.runs_on,
        "workload": {
            "source": found.workload.source,
            "prompt_tokens": len(found.workload.prompt),
            "new_tokens": len(found.workload.following),
        },
        "device": asdict(found.device) if found.device else None,
        "limits": [asdict(limit) for limit in found.limits],
        "prepared_seconds": found.prepared_seconds,
        "phases": [asdict(phase) for phase in found.phases],
        "samples": [asdict(sample) for sample in found.samples],
        "definitions": dict(found.definitions),
        "counters": found.counters,
        "hit_curve": {str(slots): rate for slots, rate in found.hit_curve.items()},
        "figures": figures(found),
        "prediction": found.prediction.to_dict(),
    }


def figures(found: Measurement) -> dict[str, float | None]:
    """What the run comes to."""
    new = len(found.workload.following)
    return {
        "peak_unevictable": found.peak,
        "mapped": found.mapped,
        "prefill_tokens_per_second": found.prefill_tokens_per_second,
        "decode_tokens_per_second": len(found.steps) / sum(found.steps),
        "median_step_tokens_per_second": found.decode_tokens_per_second,
        "load_and_prefill_seconds": found.phase("load").seconds + found.phase("prefill").seconds,
        "hit_rate": found.hit_rate,
        "flash_bytes_per_token": found.decode_counters.get("bytes_read", 0) / new,
        "stall_seconds_per_token": found.decode_counters.get("stall_seconds", 0) / new,
        "sampler_saw": found.sampler_saw,
        "accounted": accounted(found),
    }


def accounted(found: Measurement) -> float:
    """All kinds together over what the kernel counts as resident, where they agree least."""
    shares = [phase.memory.at_end.resident / phase.memory.resident_at_end for phase in found.phases]
    return max(shares, key=lambda share: abs(share - 1))


def to_csv(found: Measurement) -> str:
    """A line for each phase. Sizes in bytes, times in seconds."""
    out = io.StringIO()
    names = ["phase", "seconds", "tokens", *LABELS, "resident", "peak_unevictable", "peak_resident"]
    names += ["kernel_peak_resident", "kv_cache", "row_cache", "device"]
    names += ["cached_backbone", "cached_tables"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for phase in found.phases:
        memory = phase.memory
        values = {name: getattr(memory.at_end, name) for name in LABELS}
        values |= {name: getattr(phase, name, None) for name in names if hasattr(phase, name)}
        values |= {
            "phase": phase.name,
            "resident": memory.at_end.resident,
            "peak_unevictable": memory.peak_unevictable,
            "peak_resident": memory.peak_resident,
            "kernel_peak_resident": memory.kernel_peak_resident,
        }
        writer.writerow({name: values[name] for name in names})
    return out.getvalue()


def table(found: Measurement) -> str:
    """For people, 80 columns wide."""
    sections = [_head(found), _phases(found), _speed(found), _predicted(found), _checks(found)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def explanation(found: Measurement) -> str:
    """What every word of the table means on this system."""
    kinds = {LABELS[name]: text for name, text in found.definitions.items()}
    lines = [f"{name}: {text}." for name, text in (kinds | EXPLAINED).items()]
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ") for line in lines)


def _head(found: Measurement) -> list[str]:
    work = found.workload
    lines = [
        found.bundle,
        f"{work.source}: prompt of {len(work.prompt)} tokens, {len(work.following)} decoded",
        f"{found.system}, {found.threads} threads, context of {found.context_length} tokens",
    ]
    if found.runs_on:
        lines.append(", ".join(f"{key} {value}" for key, value in found.runs_on.items()))
    if found.prepared_seconds > 1:
        lines.append(f"the backbone was prepared first, which took {found.prepared_seconds:.0f} s")
    if found.device is not None:
        lines.append(f"on {found.device.name} ({found.device.what}):")
        lines += [f"  {limit.what + ':':<8}{limit.how}; {limit.words}" for limit in found.limits]
    return lines


def _phases(found: Measurement) -> list[str]:
    rows: list[tuple[str, Callable[[Phase], int | None]]] = []
    parts: list[tuple[str, Callable[[Phase], int | None]]] = [
        ("  in it: KV cache", lambda phase: phase.kv_cache),
        ("  in it: row cache", lambda phase: phase.row_cache),
    ]
    for kind, label in LABELS.items():
        rows.append((label, lambda phase, kind=kind: getattr(phase.memory.at_end, kind)))  # type: ignore[misc]
        rows += parts if kind == "anonymous" else []
    rows += [
        ("resident, together", lambda phase: phase.memory.at_end.resident),
        ("peak, anon. and swap", lambda phase: phase.memory.peak_unevictable),
        ("GPU memory", lambda phase: phase.device),
        ("page cache: backbone", lambda phase: phase.cached_backbone),
        ("page cache: tables", lambda phase: phase.cached_tables),
    ]
    lines = [_row("", [phase.name for phase in found.phases])]
    lines.append(_row("time", [_seconds(phase.seconds) for phase in found.phases]))
    for label, value in rows:
        values = [value(phase) for phase in found.phases]
        known = label in LABELS.values()  # a kind that this system does not tell apart is left out
        if values != [0] * len(values) and not (known and values[0] is None):
            lines.append(_row(label, ["?" if v is None else format_size(v) for v in values]))
    return lines


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<22}" + "".join(f"{cell:>11}" for cell in cells)


def _speed(found: Measurement) -> list[str]:
    values = figures(found)
    speed = format_rate(found.decode_tokens_per_second)
    rows = [
        ("prefill", f"{format_rate(found.prefill_tokens_per_second)} tokens/s"),
        ("decode", f"{format_rate(len(found.steps) / sum(found.steps))} tokens/s"),
        ("  by median step", f"{speed} tokens/s{_slow(found.steps)}"),
        ("load and prefill", f"{values['load_and_prefill_seconds']:.3g} s"),
    ]
    slots = int(found.counters["slots"])
    flash = format_size(values["flash_bytes_per_token"] or 0)
    stall = (values["stall_seconds_per_token"] or 0) * 1e3
    if found.hit_rate is not None:
        rows += [
            ("row cache", f"hit rate {found.hit_rate:.1%} while decoding"),
            ("  filled at load", f"{found.warm_slots:,} of {slots:,} slots"),
            ("from flash", f"{flash} a decoded token, stall {stall:.2g} ms"),
        ]
    return [f"{name:<22}{text}" for name, text in rows]


def _slow(steps: list[float]) -> str:
    if len(steps) < LEAST_STEPS:
        return ""
    slow = quantiles(steps, n=10, method="inclusive")[-1]
    return f"; 1 in 10 takes over {slow * 1e3:.3g} ms"


def _predicted(found: Measurement) -> list[str]:
    expected = found.prediction
    rows: list[tuple[str, float | None, float, Callable[[float], str]]] = [
        ("peak, anon. and swap", found.peak, expected.anonymous, format_size),
        ("mapped: backbone", found.mapped, expected.mapped, format_size),
        (
            "median step, tokens/s",
            found.decode_tokens_per_second,
            expected.decode_tokens_per_second,
            format_rate,
        ),
    ]
    if found.hit_rate is not None:
        rows.append(("hit rate", found.hit_rate, expected.hit_rate, lambda v: f"{v:.1%}"))
    lines = [f"{'':<22}{'measured':>11}{'predicted':>11}{'difference':>12}"]
    for name, value, other, words in rows:
        # The prediction is of kernels of the CPU.
        elsewhere = found.runs_on.get("provider", "cpu") != "cpu"
        unknown = "tokens/s" in name and (elsewhere or len(found.steps) < LEAST_STEPS)
        if value is not None and not unknown:
            difference = f"{other / value - 1:+.1%}" if value else ""
            lines.append(f"{name:<22}{words(value):>11}{words(other):>11}{difference:>12}")
    return lines


def _checks(found: Measurement) -> list[str]:
    lines = [f"A device needs {format_size(found.peak)} for this that it cannot take back."]
    if found.mapped:
        lines += [
            f"Beside it, {format_size(found.mapped)} of weights are mapped: fast while they stay in",
            "memory, read again when they were dropped.",
        ]
    lines += [
        f"checks: the kinds add up to {accounted(found):.1%} of what the system counts as",
        f"resident; samples every {found.interval * 1e3:.3g} ms",
    ]
    if found.sampler_saw is not None:
        lines[-1] += f" saw {found.sampler_saw:.1%} of the kernel's mark"
    return [*lines, "Meanings of all words: --explain"]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
