"""What bench.py measured, as figures and as a table."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from stem_edge.bundle import BACKBONE_DATA, WEIGHT_BITS, Bundle
from stem_edge.quantize import fitting_block


@dataclass
class Measured:
    """Figures of one subject, a list entry a round."""

    prefill: list[float] = field(default_factory=list)  # tokens a second
    decode: list[float] = field(default_factory=list)  # over all steps of a round
    step: list[float] = field(default_factory=list)  # by the median step of a round
    first: list[float] = field(default_factory=list)  # seconds from prompt to first token
    counters: list[dict[str, float]] = field(default_factory=list)  # of the decode steps
    loads: list[tuple[float, float]] = field(default_factory=list)  # seconds: loaded, first token
    cold_loads: list[tuple[float, float]] = field(default_factory=list)
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)  # phase -> kind -> bytes
    loaded: dict[str, Any] = field(default_factory=dict)

    def add(self, prompt: int, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        """One round."""
        self.prefill.append(prompt / prefill["seconds"])
        self.first.append(prefill["seconds"])
        steps = decode["steps"]
        self.decode.append(len(steps) / sum(steps))
        self.step.append(1 / median(steps))
        before, after = prefill["counters"], decode["counters"]
        self.counters.append(
            {name: after[name] - before[name] for name in after} | {"steps": len(steps)}
        )


def summary(measured: Measured) -> dict[str, Any]:
    """All figures of a subject, medians over the rounds, for JSON."""
    return {
        "prefill_tokens_per_second": median(measured.prefill),
        "decode_tokens_per_second": median(measured.decode),
        "median_step_tokens_per_second": median(measured.step),
        "first_token_seconds": median(measured.first),
        "load_seconds": _median([load for load, _ in measured.loads]),
        "load_to_first_token_seconds": _median([first for _, first in measured.loads]),
        "cold_load_to_first_token_seconds": _median([first for _, first in measured.cold_loads]),
        "peak_memory": measured.peaks,
        "flash_bytes_per_token": _per_step(measured, "bytes_read"),
        "stall_seconds_per_token": _per_step(measured, "stall_seconds"),
        "hit_rate": _hit_rate(measured),
        "rounds": {
            "prefill": measured.prefill,
            "decode": measured.decode,
            "median_step": measured.step,
        },
    }


def token_nbytes(bundle: Bundle, position: int) -> int:
    """Bytes that a decode step at this position reads from memory."""
    manifest = bundle.manifest
    config, bits = manifest.model, WEIGHT_BITS[manifest.backbone.head]
    nbytes = manifest.files[BACKBONE_DATA].nbytes
    nbytes -= config.vocab_size * config.dim * bits // 8  # the embedding, of which one row is read
    if bits != 32:
        groups = config.dim // fitting_block(config.dim, manifest.backbone.block_size)
        nbytes -= config.vocab_size * (4 * groups + -(-groups * bits // 8))
    nbytes += 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4 * position
    return nbytes + (manifest.tables.record_nbytes if manifest.tables else 0)


def machine() -> str:
    """Processor and memory in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    extras = [name for name in ("avx512_vnni", "avx_vnni", "amx_int8") if name in flags]
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 1e6
    name = names[0] if names else platform.processor()
    return f"{len(names)} x {name} ({', '.join(extras) or 'no VNNI'}), {total:.0f} GB"


def print_report(
    report: dict[str, Any],
    bundle: Bundle,
    measured: dict[str, Measured],
    bandwidths: list[float],
    args: argparse.Namespace,
) -> None:
    """The table for people."""
    print(f"{report['machine']}, {args.threads} threads; {bundle.path}")
    cold = ", tables not in the page cache" if args.cold else ""
    print(f"prompts of {args.prompt}, {args.tokens} steps, {args.rounds} rounds{cold}")
    if args.emulate_flash or any(name.startswith("flash=") for name in measured):
        print("flash is EMULATED where a profile is named: delays only (runtime/flash.py)")
    print(
        f"\n{'':<20}{'prefill':>9}{'decode':>8}{'by step':>8}{'first':>8}{'load':>7}{'+first':>7}{'cold':>7}"
        f"{'anon':>7}{'file':>7}{'flash':>8}{'hits':>6}{'stall':>7}"
    )
    print(
        f"{'':<20}{'tok/s':>9}{'tok/s':>8}{'tok/s':>8}{'ms':>8}{'s':>7}{'s':>7}{'s':>7}"
        f"{'MB':>7}{'MB':>7}{'B/tok':>8}{'%':>6}{'ms/tok':>7}"
    )
    for name, figures in report["subjects"].items():
        print(_line(name, figures))
    _print_phases(report)
    _print_ratios(measured)
    rate = median(bandwidths)
    nbytes = token_nbytes(bundle, args.prompt + args.tokens // 2)
    bound = rate / nbytes
    # Bandwidth was measured just before each round: it changes where others share the machine.
    mine = measured["bundle"].step
    reached = median([step * nbytes / rate for step, rate in zip(mine, bandwidths, strict=True)])
    print(
        f"\nmemory bandwidth {rate / 1e9:.1f} GB/s ({min(bandwidths) / 1e9:.1f} to "
        f"{max(bandwidths) / 1e9:.1f}); a token reads {nbytes / 1e6:.0f} MB: at most "
        f"{bound:.1f} tok/s, {reached:.2f} of it reached"
    )


def _line(name: str, figures: dict[str, Any]) -> str:
    peaks = figures["peak_memory"].values()
    anonymous = max(peak["anonymous"] for peak in peaks) / 1e6
    mapped = max(peak["file"] for peak in peaks) / 1e6
    hit_rate = figures["hit_rate"]
    return (
        f"{name:<20}{figures['prefill_tokens_per_second']:>9.0f}"
        f"{figures['decode_tokens_per_second']:>8.1f}"
        f"{figures['median_step_tokens_per_second']:>8.1f}"
        f"{figures['first_token_seconds'] * 1e3:>8.0f}"
        f"{_cell(figures['load_seconds'], 7)}{_cell(figures['load_to_first_token_seconds'], 7)}"
        f"{_cell(figures['cold_load_to_first_token_seconds'], 7)}{anonymous:>7.0f}{mapped:>7.0f}"
        f"{_cell(figures['flash_bytes_per_token'], 8, 0)}"
        f"{_cell(None if hit_rate is None else hit_rate * 100, 6, 1)}"
        f"{_cell(_times(figures['stall_seconds_per_token'], 1e3), 7)}"
    )


def _print_phases(report: dict[str, Any]) -> None:
    print("\npeak memory by phase, anonymous + mapped from files, MB")
    for name, figures in report["subjects"].items():
        cells = [
            f"{phase} {peak['anonymous'] / 1e6:.0f} + {peak['file'] / 1e6:.0f}"
            for phase, peak in figures["peak_memory"].items()
        ]
        print(f"{name:<20}{',  '.join(cells)}")


def _print_ratios(measured: dict[str, Measured]) -> None:
    mine = measured["bundle"]
    for name, other in measured.items():
        if other is mine:
            continue
        for what in ("prefill", "decode", "step"):
            pairs = zip(getattr(mine, what), getattr(other, what), strict=True)
            ratios = [a / b for a, b in pairs]
            print(
                f"\nbundle / {name}: {what} {median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})",
                end="",
            )
    print()


def _per_step(measured: Measured, name: str) -> float | None:
    values = [c[name] / c["steps"] for c in measured.counters if name in c]
    return _median(values)


def _hit_rate(measured: Measured) -> float | None:
    hits = sum(c.get("hits", 0) for c in measured.counters)
    uses = hits + sum(c.get("misses", 0) for c in measured.counters)
    return hits / uses if uses else None


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'' if value is None else f'{value:.{digits}f}':>{width}}"
