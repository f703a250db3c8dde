"""Options of `load` on a command line, the same for every command that loads a bundle."""

from __future__ import annotations

import argparse
from typing import cast

from stem_edge.commands.arguments import engine_name
from stem_edge.commands.providers import add_library, parse_libraries, parse_providers
from stem_edge.runtime.backends.engines import engine_names
from stem_edge.runtime.backends.options import DeviceKeywords, LoadKeywords
from stem_edge.runtime.rows.flash import FLASH_NAMES
from stem_edge.runtime.rows.store import READ_MODES

KEYWORDS = LoadKeywords.__annotations__.keys()


def add_engine(group: argparse._ActionsContainer) -> None:
    """Declare what chooses the engine and how it holds the weights."""
    group.add_argument(
        "--engine",
        type=engine_name,
        choices=engine_names(),
        default="auto",
        help="what runs the backbone (the first that the bundle has one for and that is installed)",
    )
    group.add_argument(
        "--repack",
        action="store_true",
        help="rearrange ggml's 4-bit matrices in memory: faster, for a copy of them that stays there",
    )


def add_providers(group: argparse._ActionsContainer) -> None:
    """Declare what chooses what the backbone runs on."""
    group.add_argument(
        "--providers",
        metavar="NAME,...",
        help="run the backbone on these of onnxruntime, like cuda or webgpu:key=value,key=value; "
        "add cpu last to run unsupported operators there; auto: the first accelerator, else the "
        "CPU (cpu)",
    )
    add_library(group)
    group.add_argument(
        "--device-memory", metavar="SIZE", help="limit of an accelerator's memory, like 2GB"
    )
    group.add_argument(
        "--host-slots",
        type=int,
        metavar="N",
        help="records kept in memory between flash and an accelerator (all that fit)",
    )


def device_options(args: argparse.Namespace) -> DeviceKeywords:
    """What was said of them, as arguments of stem_edge.load."""
    return {
        "providers": parse_providers(args.providers),
        "provider_libraries": parse_libraries(args.provider_library),
        "device_memory": args.device_memory,
        "host_slots": args.host_slots,
    }


def add_loading(group: argparse._ArgumentGroup) -> None:
    """Declare them."""
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="RAM limit, like 600MB; mapped weights do not count (half of the free RAM)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads (the CPUs it may use)")
    group.add_argument(
        "--context-length", type=int, metavar="N", help="prompt and answer together, in tokens"
    )
    add_engine(group)
    add_providers(group)
    group.add_argument(
        "--reads", choices=READ_MODES, default="pread", help="how records are read (pread)"
    )
    group.add_argument(
        "--slots", type=int, metavar="N", help="tokens whose rows stay in memory (all that fit)"
    )
    group.add_argument("--resident", action="store_true", help="read all tables into memory first")
    group.add_argument(
        "--prefill-graph",
        action=argparse.BooleanOptionalAction,
        help="whether the int8 graph takes prompts (if it is as exact here as its bundle says, and not slower)",
    )
    group.add_argument(
        "--no-prepare",
        dest="prepare",
        action="store_false",
        help="do not keep a backbone for this processor",
    )
    group.add_argument(
        "--no-warm-start",
        dest="warm_start",
        action="store_false",
        help="begin with an empty row cache, and keep no count of the tokens that are used",
    )
    group.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache folder")
    group.add_argument(
        "--emulate-flash",
        choices=FLASH_NAMES,
        help="delay reads as such flash would (emulated, for comparing)",
    )
    group.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="do not read rows ahead; the text is the same",
    )


def loading_options(args: argparse.Namespace) -> LoadKeywords:
    """What was said, as arguments of stem_edge.load: options have the names of its keywords."""
    said = {name: value for name, value in vars(args).items() if name in KEYWORDS}
    return cast(LoadKeywords, said | device_options(args))
