"""The command `stem-edge fit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from stem_edge.bundle.manifest import BACKBONES
from stem_edge.commands.options.loading import add_loading
from stem_edge.measuring.memory.device_profiles import DEVICES
from stem_edge.measuring.planning.candidates import is_bundle, model_folder
from stem_edge.measuring.planning.fit import fit
from stem_edge.measuring.planning.target import Fit
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.planner import USUAL_CONTEXT
from stem_edge.runtime.rows.emulated_flash import FLASH_NAMES, PROFILES
from stem_edge.text_table import table
from stem_edge.units import format_rate, format_size

DESCRIPTION = """\
Plan how to run a bundle on a device, without running it: how long a context and how many rows fit
into memory, and how much memory and time to expect. For a checkpoint, also plan which types to
export it with.

Here --memory includes the weights: they are mapped from their file, but every token reads them, so
decoding is fast only while they stay in memory."""

EPILOG = """\
examples:
  stem-edge fit model --memory 1GB
  stem-edge fit model --memory 1GB --flash ufs2 --context-length 4096
  stem-edge fit model --device phone-4gb
  stem-edge fit runs/0000100000 --device pi5

devices, with what one program can have of each (round numbers, for planning):
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    devices = [
        (
            *(f"  {device.name}", format_size(device.memory), f"{device.cpus} cores"),
            *(f"{device.bandwidth / 1e9:g} GB/s", device.flash, device.what),
        )
        for device in DEVICES.values()
    ]
    parser.epilog = EPILOG + "\n".join(table(devices, "lrrrl"))
    add = parser.add_argument
    add("path", metavar="BUNDLE|CHECKPOINT", help="what to plan for, a path or hf:org/name")
    memory = "what the program may take, like 1GB (default: what is free)"
    add("--memory", metavar="SIZE", help=memory)
    add("--device", metavar="NAME", help="plan for a device listed below, not this machine")
    flash = "kind of flash that holds the tables (default: the device's, or the page cache)"
    add("--flash", choices=FLASH_NAMES, help=flash)
    add_loading(parser, "tables")
    bandwidth = (
        "bytes that the processor reads from memory in a second, like 17GB (default: the device's, "
        "or measured here)"
    )
    add("--bandwidth", metavar="SIZE", help=bandwidth)
    context = "most tokens of prompt and answer together (default: what leaves room for rows)"
    add("--context-length", type=int, metavar="N", help=context)
    text = "text like those to come, to estimate the hit rate of the row cache"
    add("--text", metavar="FILE", help=text)
    add_loading(parser, "threads", "sequences", "engine", "repack", "kv")
    add("--json", action="store_true", help="print all figures as JSON")


def run(args: argparse.Namespace) -> int:
    shown, args.path = args.path, model_folder(args.path)
    fits = fit(**{name: value for name, value in vars(args).items() if name != "json"})
    if args.json:
        print(json.dumps([to_dict(one) for one in fits], indent=1))
    else:
        asked = "" if args.engine == "auto" else args.engine
        path = shown if args.tables is None else f"{shown} --tables {args.tables}"
        print(report_table(fits, path, bundle=is_bundle(args.path), engine=asked))
    return 0


def to_dict(one: Fit) -> dict[str, object]:
    """Return the figures of a plan as plain JSON values: bytes, seconds, tokens."""
    return {
        "backbone": one.types.weights,
        "block_size": getattr(one.types, "block_size", None),
        "engine": one.plan.engine,
        "tables": one.tables,
        "flash_nbytes": one.footprint.flash_nbytes,
        "memory": one.memory,
        "load_memory": one.load_memory,
        "context_length": one.plan.context_length,
        "kv": one.plan.kv,
        "sequences": one.plan.sequences,
        "slots": one.plan.slots,
        "hit_source": one.hit_source,
        "rates": one.bandwidth.source,
        "flash": one.flash,
        "plan": asdict(one.plan),
        "prediction": one.prediction.to_dict(),
    }


def report_table(fits: list[Fit], path: str, *, bundle: bool, engine: str = "") -> str:
    """Return the best plan in full, and a line for each other plan that fits.

    engine: the engine that was asked for, or an empty text.
    """
    lines = [*_figures(fits[0]), "", *_commands(fits[0], path, engine, bundle=bundle)]
    if len(fits) > 1:
        lines += ["", "also fit:"]
        lines += [f"  {_types(one)}: {_short(one)}" for one in fits[1:]]
    return "\n".join(lines)


def _figures(one: Fit) -> list[str]:
    found, plan = one.prediction, one.plan
    text = f"in a text of {min(plan.context_length, USUAL_CONTEXT):,} tokens on average"
    times = f"{plan.sequences} x " if plan.sequences > 1 else ""
    anonymous = f"{format_size(found.anonymous)} ({format_size(plan.total)} at most)"
    rows = [
        ("types", _types(one)),
        ("on flash", format_size(one.footprint.flash_nbytes)),
        ("memory, expected", format_size(one.memory)),
        ("  anonymous, at peak", anonymous),
        (
            "    KV cache",
            f"{format_size(plan.kv_cache)} for {times}{plan.context_length:,} tokens, {plan.kv}",
        ),
    ]
    if one.tables:
        rows.append(("    row cache", f"{format_size(found.row_cache)}, {plan.slots:,} slots"))
    if one.mapped:
        mapped = f"{format_size(one.mapped)}, if they are to be read fast"
        rows.append(("  weights, mapped", mapped))
    rows += [
        ("a decoded token reads", f"{format_size(found.weights_per_token)} of weights"),
        ("  of the KV cache", f"{format_size(found.kv_per_token)}, {text}"),
    ]
    if one.tables:
        rows += [
            ("  from flash", f"{format_size(found.rows_per_token)} on average"),
            ("row cache hit rate", f"{found.hit_rate:.0%} ({one.hit_source})"),
        ]
    rows += [
        ("decoding, at most", f"{format_rate(found.decode_tokens_per_second)} tokens/s, {text}"),
        ("  at its beginning", f"{format_rate(_speed(one, 0))} tokens/s"),
        ("  context full", f"{format_rate(_speed(one, plan.context_length))} tokens/s"),
    ]
    if one.tables:
        stall = f"{found.stall_per_token * 1e3:.3g} ms a token, {_flash(one)}"
        rows.append(("  waiting for rows", stall))
    rows.append(("  speed of memory", one.bandwidth.source))
    if plan.preparing is not None:
        rows.append(("preparing, at first", str(plan.preparing)))
    return table(rows, "l")


def _speed(one: Fit, tokens: int) -> float:
    """Return the most tokens a second after a text of so many."""
    reads = one.prediction.weights_per_token + one.footprint.kv_read_nbytes(tokens)
    return 1 / (reads / one.bandwidth.rate + one.prediction.stall_per_token)


def _flash(one: Fit) -> str:
    if one.flash is None:
        return "records come out of the page cache"
    profile = PROFILES[one.flash]
    return (
        f"{one.flash}: {format_size(profile.bandwidth)}/s, {profile.latency * 1e6:.0f} us a read "
        "(stated)"
    )


def _commands(one: Fit, path: str, engine: str, *, bundle: bool) -> list[str]:
    limit = f"--memory {-(-one.load_memory // 10**6)}MB --context-length {one.plan.context_length}"
    if one.plan.sequences > 1:
        limit += f" --sequences {one.plan.sequences}"
    if one.footprint.kv != one.footprint.caches.usual:
        limit += f" --kv {one.plan.kv}"
    limit += (f" --engine {engine}" if bundle and engine else "") + " --repack" * one.needs.repack
    limit += " --no-prefill-graph" * (one.footprint.prefill_nbytes > 0 and not one.needs.prefill)
    if bundle:
        return ["run it with:", f"  stem-edge generate {path} {limit}"]
    footprint = one.footprint
    _, types = ENGINES[footprint.engine].ways.expected.types(footprint)
    types += f" --tables {one.tables}" if one.tables else ""
    if footprint.own_types:
        types = f"--engine {BACKBONES[footprint.engine].option}" if engine else ""
    return [
        "make it and run it with:",
        f"  stem-edge export {path} OUT {types}".rstrip(),
        f"  stem-edge generate OUT {limit}",
    ]


def _types(one: Fit) -> str:
    rows = f", tables {one.tables}" if one.tables else ", a dense model"
    shown, _ = ENGINES[one.footprint.engine].ways.expected.types(one.footprint)
    return shown + rows


def _short(one: Fit) -> str:
    return (
        f"{format_size(one.memory)} of memory, {format_size(one.footprint.flash_nbytes)} on flash, "
        f"{one.plan.slots:,} slots, context {one.plan.context_length:,}, "
        f"{format_rate(one.prediction.decode_tokens_per_second)} tokens/s"
    )
