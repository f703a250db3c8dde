"""What bench.py compares: names on its command line -> engines, what they load, and how."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stem_edge
from stem_edge.bundle import Bundle


@dataclass
class Subject:
    """What one column of the table is about."""

    name: str
    kind: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)


def make_subjects(args: argparse.Namespace, bundle: Bundle) -> list[Subject]:
    """The bundle, and what it is compared with."""
    options: dict[str, Any] = {"memory": args.memory} if args.memory else {}
    if bundle.manifest.tables is not None and not args.memory:
        options["slots"] = args.slots or max(1, bundle.manifest.model.vocab_size // 100)
    if args.emulate_flash:
        options["emulate_flash"] = args.emulate_flash
    path = str(bundle.path.resolve())
    subjects = [Subject("bundle", "stem-edge", path, options)]
    ways: dict[str, dict[str, Any]] = {
        "unprepared": {"prepare": False},
        "mmap": {"reads": "mmap"},
        "plain": {"overlap": False},
    }
    for wanted in args.against:
        name, _, value = wanted.partition("=")
        if name in ("dense", "block"):
            tables = stem_edge.open_bundle(value).manifest.tables
            mine = options if tables is not None else {}
            subjects.append(Subject(wanted, "stem-edge", str(Path(value).resolve()), mine))
        elif name == "flash":
            subjects.append(Subject(wanted, "stem-edge", path, options | {"emulate_flash": value}))
        elif name == "resident":
            rest = {key: each for key, each in options.items() if key != "slots"}
            subjects.append(Subject(name, "stem-edge", path, rest | {"resident": True}))
        elif name in ways:
            subjects.append(Subject(name, "stem-edge", path, options | ways[name]))
        elif name == "torch":
            subjects.append(Subject(name, "torch", path))
        elif name == "llama.cpp":
            subjects += llama_subjects(args, bundle, value)
        else:
            raise SystemExit(f"--against {wanted} is not known; see --help")
    return subjects


def llama_subjects(args: argparse.Namespace, bundle: Bundle, kind: str) -> list[Subject]:
    """Dense models of the bundle's shape for llama.cpp, made in the work folder."""
    from bench_llama import TYPES, make_model
    from make_checkpoint import Shape

    config = bundle.manifest.model
    shape = Shape(
        vocab_size=config.vocab_size,
        dim=config.dim,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_ff=config.d_ff,
        stem_layers=(),
        max_seqlen=config.max_context,
        rope_theta=config.rope_theta,
    )
    args.work.mkdir(parents=True, exist_ok=True)
    kinds = [kind] if kind else list(TYPES)
    return [
        Subject(f"llama.cpp {k}", "llama.cpp", str(make_model(args.work, shape, k, args.threads)))
        for k in kinds
    ]
