"""Options of stem_edge.load on a command line, shared by every command that loads a bundle."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from stem_edge.commands.options.arguments import MORE, engine_name
from stem_edge.commands.options.described import add_described
from stem_edge.errors import InputError
from stem_edge.graph.kv import KV_CHOICES
from stem_edge.runtime.backends.engines import engine_names
from stem_edge.runtime.backends.keywords import DeviceKeywords, LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions, Speculate
from stem_edge.runtime.loading import load
from stem_edge.runtime.rows.emulated_flash import FLASH_NAMES

BUNDLE_HELP = "folder, FILE.gguf, hf:org/name, or a listed name"


def speculation(text: str) -> Speculate:
    """Value of the option --speculate; argparse reports a ValueError as a bad value."""
    known: dict[str, Speculate] = {"auto": "auto", "on": True, "off": False}
    return known[text] if text in known else int(text)


_SIZE = {"metavar": "SIZE"}
_COUNT = {"type": int, "metavar": "N"}
_FLAG = {"action": "store_true"}
_EITHER = {"action": argparse.BooleanOptionalAction}
KV = "type of keys and values: fp32, fp16, int8 or int4"
SPECULATE = "draft tokens: auto (only if answers stay the same), on, off, N"
# Keywords of load that are options of every command that loads a bundle, and their settings of argparse.
LOADING: dict[str, dict[str, Any]] = {
    "memory": _SIZE | {"help": "limit on memory, like 600MB (default: half the free)"},
    "threads": _COUNT | {"help": "threads that compute (default: one for each CPU)"},
    "context_length": _COUNT | {"help": "tokens of prompt and answer at most"},
    "sequences": _COUNT | {"help": "full contexts that fit at a time"},
    "engine": {"type": engine_name, "metavar": "NAME", "help": "onnxruntime or ggml"},
    "kv": {"choices": KV_CHOICES, "metavar": "TYPE", "help": KV},
    "speculate": {"type": speculation, "metavar": "WHEN", "help": SPECULATE},
    "exact": _FLAG | {"help": "the same answer, however it is run"},
    "draft": {"metavar": "BUNDLE", "help": MORE},
    "slots": _COUNT | {"help": MORE},
    "resident": _FLAG | {"help": MORE},
    "tables": {"metavar": "URL", "help": MORE},
    "device_memory": _SIZE | {"help": MORE},
    "cache_dir": {"metavar": "DIR", "help": MORE},
    "repack": _FLAG,
    "overlap": _EITHER,
    "warm_start": _EITHER,
    "emulate_flash": {"choices": FLASH_NAMES},
    "providers": {
        "metavar": "NAME,...",
        "help": "execution providers of onnxruntime that run the backbone, like cuda or "
        "webgpu:key=value,key=value; with cpu last, the CPU runs operators that the others lack; "
        "auto: the first accelerator, else the CPU (default: cpu)",
    },
    "provider_libraries": {
        "flags": ("--provider-library",),
        "action": "append",
        "metavar": "NAME=PATH",
        "help": "load an execution provider from this library, and call it NAME; its code runs here, "
        "so use one that you trust",
    },
}
# For commands that answer prompts.
PROMPT_CACHE: dict[str, dict[str, Any]] = {
    "prompt_cache": {
        "nargs": "?",
        "const": True,
        "metavar": "DIR",
        "help": "keep prompts in files for later runs (--prompt-cache=DIR)",
    }
}
DEVICE = ("providers", "provider_libraries", "device_memory")


def add_loading(group: argparse._ActionsContainer, *names: str) -> None:
    """Declare options that are keywords of load: these, or all."""
    defaults = {field.name: field.default for field in fields(LoadOptions)}
    known = LOADING | PROMPT_CACHE
    known["engine"] = known["engine"] | {"choices": engine_names()}
    add_described(group, load, {name: known[name] for name in names or LOADING}, defaults)


def loading_options(args: argparse.Namespace) -> LoadKeywords:
    """Values of the options of add_loading, as keywords of stem_edge.load. Raises InputError."""
    given = {name: getattr(args, name) for name in LOADING}
    given["prompt_cache"] = getattr(args, "prompt_cache", None)
    return cast(LoadKeywords, given | device_options(args))


def device_options(args: argparse.Namespace) -> DeviceKeywords:
    """Values of the options DEVICE, as keywords of stem_edge.load. Raises InputError."""
    return {
        "providers": parse_providers(args.providers),
        "provider_libraries": parse_libraries(args.provider_libraries),
        "device_memory": args.device_memory,
    }


def parse_libraries(given: Sequence[str] | None) -> dict[str, str] | None:
    """Paths of provider libraries by name; None without such options. Raises InputError."""
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
    """Providers from "NAME,NAME:key=value,key=value", for stem_edge.load. Raises InputError."""
    if given is None:
        return None
    # A comma before key= separates options of one provider instead of two providers.
    return [_provider(text) for text in re.split(r",(?![^,:=]*=)", given)]


def _provider(text: str) -> str | tuple[str, Mapping[str, object]]:
    name, colon, options = text.partition(":")
    if not colon:
        return name
    pairs = [part.partition("=") for part in options.split(",")]
    keys = [key for key, _, _ in pairs]
    if not name or not all(key and equals for key, equals, _ in pairs) or len({*keys}) < len(keys):
        raise InputError(
            f"--providers has {text!r}; expected NAME or NAME:key=value,key=value, each key once, "
            "like cuda:device_id=1"
        )
    return name, {key: value for key, _, value in pairs}
