"""Options of stem_edge.load on a command line, shared by every command that loads a bundle."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, cast

from stem_edge.commands.options.arguments import MORE
from stem_edge.graph.kv import KV_CHOICES
from stem_edge.runtime.backends.engines import ENGINE_NAMES
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions

BUNDLE_HELP = "folder, FILE.gguf, hf:org/name, or a listed name"


def speculation(text: str) -> int | str:
    """Parse the value of --speculate. Returns an unknown word as it is: LoadOptions refuses it."""
    return int(text) if text.isdecimal() else {"on": True, "off": False}.get(text, text)


CONTEXT = ("-c", "--context-length", "--ctx-size", "--num-ctx", "--max-kv-size")
_SIZE = {"metavar": "SIZE"}
_COUNT = {"type": int, "metavar": "N"}
_FLAG = {"action": "store_true"}
KEEP = "keep prompts in files (--prompt-cache=DIR)"
KV = "type of keys and values: fp32, fp16, int8 or int4"
SPECULATE = "draft tokens: auto, on, off, or N for a step"
# Keywords of load that are options of every command that loads a bundle, and their settings of argparse.
LOADING: dict[str, dict[str, Any]] = {
    "memory": _SIZE | {"help": "limit on memory, like 600MB (default: half the free)"},
    "threads": _COUNT
    | {"flags": ("-t", "--threads"), "help": "threads that compute (default: one for each CPU)"},
    "context_length": _COUNT | {"flags": CONTEXT, "help": "tokens of prompt and answer at most"},
    "sequences": _COUNT | {"help": "full contexts that fit at a time"},
    "engine": {"choices": ENGINE_NAMES, "metavar": "NAME", "help": "onnxruntime or ggml"},
    "kv": {"choices": KV_CHOICES, "metavar": "TYPE", "help": KV},
    "speculate": {"type": speculation, "metavar": "WHEN", "help": SPECULATE},
    "exact": _FLAG | {"help": MORE},
    "slots": _COUNT | {"help": MORE},
    "resident": _FLAG | {"help": MORE},
    "tables": {"metavar": "URL", "help": MORE},
    "provider": {"metavar": "NAME", "help": MORE},
    "device_memory": _SIZE | {"help": MORE},
    "cache_dir": {"metavar": "DIR", "help": MORE},
    "prompt_cache": {"nargs": "?", "const": True, "metavar": "DIR", "help": KEEP},
}


def add_loading(group: argparse._ActionsContainer, *names: str) -> None:
    """Declare command-line options for these keywords of stem_edge.load; by default, for all."""
    defaults = {field.name: field.default for field in fields(LoadOptions)}
    for name in names or LOADING:
        given: dict[str, Any] = {"dest": name, "default": defaults[name], **LOADING[name]}
        flags = given.pop("flags", ("--" + name.replace("_", "-"),))
        group.add_argument(*flags, **given)


def loading_options(args: argparse.Namespace) -> LoadKeywords:
    return cast(LoadKeywords, {name: getattr(args, name) for name in LOADING})
