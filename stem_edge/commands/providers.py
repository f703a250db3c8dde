"""Execution providers on command lines: their names, options and libraries, and a list of them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import stem_edge
from stem_edge.errors import InputError
from stem_edge.text_table import printable, table

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.providers.provider import Listed, ListedDevice


def add_library(group: argparse._ActionsContainer) -> None:
    """Declare where plug-in providers come from; see parse_libraries."""
    group.add_argument(
        "--provider-library",
        action="append",
        metavar="NAME=PATH",
        help="use the execution provider in this library, by that name; code that you trust",
    )


def parse_libraries(given: Sequence[str] | None) -> dict[str, str] | None:
    """Paths by names. Raises InputError."""
    found: dict[str, str] = {}
    for text in given or ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise InputError(
                f"--provider-library is {text!r}; expected NAME=PATH, like webgpu=/opt/libwebgpu.so"
            )
        if name in found:
            raise InputError(f"--provider-library names {name} more than once; choose another name")
        found[name] = path
    return found or None


def parse_providers(given: str | None) -> list[str | tuple[str, Mapping[str, object]]] | None:
    """As `providers` of stem_edge.load takes them: NAME or NAME:key=value,key=value, with commas."""
    if given is None:
        return None
    # A comma before key= is between the options of one provider.
    return [_provider(text) for text in re.split(r",(?![^,:=]*=)", given)]


def _provider(text: str) -> str | tuple[str, Mapping[str, object]]:
    name, colon, options = text.partition(":")
    if not colon:
        return name
    pairs = [part.partition("=") for part in options.split(",")]
    keys = [key for key, _, _ in pairs]
    if not name or not all(key and equals for key, equals, _ in pairs) or len({*keys}) < len(keys):
        raise InputError(
            f"--providers has {text!r}; expected NAME or NAME:key=value,key=value, each key once, like "
            "cuda:device_id=1"
        )
    return name, {key: value for key, _, value in pairs}


def add_listing(parser: argparse._ActionsContainer) -> None:
    """Declare what asks `inspect` for the list, or for a plan on some of them."""
    parser.add_argument(
        "--providers",
        nargs="?",
        const="",
        metavar="NAME,...",
        help="alone: show which execution providers of onnxruntime can be used here, and what brings "
        "others; with --memory and names: the plan for these, as generate takes them",
    )
    add_library(parser)
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="for --memory on an accelerator: its limit, like 2GB",
    )


def is_listing(args: argparse.Namespace) -> bool:
    """Whether the list is asked for."""
    return bool(args.providers == "")


def check_listing(args: argparse.Namespace) -> None:
    """Raises InputError for what does not go together with the list, or without it."""
    others = ("bundle", "memory", "context_length", "device_memory", "text")
    given = [name for name in others if getattr(args, name) is not None]
    given += [name for name in ("cost", "geometry") if getattr(args, name)]
    if is_listing(args) and given:
        name = "BUNDLE" if given[0] == "bundle" else f"--{given[0].replace('_', '-')}"
        raise InputError(
            f"--providers without names shows this machine, and {name} is given; leave it out, or "
            "name providers after it, for --memory"
        )
    if args.providers and args.bundle is None:
        raise InputError(
            "--providers with names needs a BUNDLE before it and --memory; without names it shows "
            "what this machine has"
        )
    if not is_listing(args) and args.bundle is None:
        raise InputError("inspect needs the folder of a BUNDLE, or --providers")
    if args.memory is None and (args.providers or args.device_memory is not None):
        raise InputError("--providers and --device-memory belong to --memory here; add --memory")
    if args.provider_library and args.providers is None:
        raise InputError("--provider-library belongs to --providers, which is not given; add it")


def show_listing(args: argparse.Namespace) -> None:
    """Print the list."""
    found = stem_edge.providers(parse_libraries(args.provider_library))
    if args.json:
        print(json.dumps([asdict(listed) for listed in found], indent=1))
    else:
        print("\n".join(_lines(found)))


def _lines(found: Sequence[Listed]) -> list[str]:
    """A readable table: the ones that can be used first."""
    rows = [("provider", "", "devices, or what brings it")]
    for listed in sorted(found, key=lambda listed: not listed.available):
        own = "memory of its own" if listed.own_memory else ""
        texts = [_device(device) for device in listed.devices] or [own]
        if not listed.available:
            rows.append((listed.name, "no", printable(listed.reason)))
            continue
        names = [listed.name, *[""] * len(texts)]
        rows += [(name, "", printable(text)) for name, text in zip(names, texts, strict=False)]
    return table(rows, "l")


def _device(device: ListedDevice) -> str:
    known = device.name if device.vendor in device.name else f"{device.vendor} {device.name}"
    return f"{device.kind} {known.strip()}{', memory of its own' * device.own_memory}"
