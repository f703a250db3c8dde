"""Options of stem_edge.load on a command line, shared by every command that loads a bundle."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from stem_edge.commands.options.arguments import engine_name
from stem_edge.errors import InputError
from stem_edge.graph.kv import KV_CHOICES
from stem_edge.runtime.backends.engines import engine_names
from stem_edge.runtime.backends.keywords import DeviceKeywords, LoadKeywords
from stem_edge.runtime.backends.options import Speculate
from stem_edge.runtime.rows.emulated_flash import FLASH_NAMES
from stem_edge.runtime.rows.shards import READ_MODES


def add_loading(group: argparse._ActionsContainer) -> None:
    """Declare every option of this module but that of add_prompt_cache; loading_options reads them."""
    memory = "RAM limit, like 600MB; mapped weights do not count (default: half of the free RAM)"
    group.add_argument("--memory", metavar="SIZE", help=memory)
    add_threads(group)
    context = (
        "most tokens of prompt and answer together (default: the model's, or as many as --memory "
        "leaves room for beside the row cache)"
    )
    group.add_argument("--context-length", type=int, metavar="N", help=context)
    add_sequences(group)
    add_engine(group)
    add_kv(group)
    add_providers(group)
    _add_speculation(group)
    _add_rows(group)
    _add_prepared(group)


def add_threads(group: argparse._ActionsContainer) -> None:
    """Declare how many threads compute."""
    threads = "threads that compute (default: one for each usable CPU)"
    group.add_argument("--threads", type=int, metavar="N", help=threads)


def add_sequences(group: argparse._ActionsContainer) -> None:
    """Declare how many contexts there is memory for."""
    sequences = (
        "full contexts that the KV cache has room for at a time (default: 1; of batch and serve: 8 "
        "answers, in what memory leaves room for)"
    )
    group.add_argument("--sequences", type=int, default=1, metavar="N", help=sequences)


def add_engine(group: argparse._ActionsContainer) -> None:
    """Declare what chooses the engine and how it holds the weights."""
    group.add_argument(
        "--engine",
        type=engine_name,
        choices=engine_names(),
        default="auto",
        help="what runs the backbone (default: auto, the first of onnxruntime and ggml that is "
        "installed and that the bundle has a backbone for)",
    )
    group.add_argument(
        "--repack",
        action="store_true",
        help="on ggml: copy 4-bit matrices into RAM in this processor's order, for speed",
    )


def add_kv(group: argparse._ActionsContainer) -> None:
    """Declare the type of keys and values."""
    group.add_argument(
        "--kv",
        choices=KV_CHOICES,
        default="auto",
        help="type of keys and values in the KV cache (default: auto, the engine's usual one, or int8 "
        "if the context would otherwise be shorter than 4096)",
    )


def add_providers(group: argparse._ActionsContainer) -> None:
    """Declare what chooses the processor or accelerator that runs the backbone."""
    add = group.add_argument
    providers = (
        "execution providers of onnxruntime that run the backbone, like cuda or "
        "webgpu:key=value,key=value; with cpu last, the CPU runs operators that the others lack; "
        "auto: the first accelerator, else the CPU (default: cpu)"
    )
    add("--providers", metavar="NAME,...", help=providers)
    add_provider_library(group)
    device = "limit of the accelerator's memory, like 2GB (default: what is free, if it says so)"
    add("--device-memory", metavar="SIZE", help=device)
    tier = "records kept in RAM between flash and an accelerator (default: all that fit)"
    add("--host-slots", type=int, metavar="N", help=tier)


def add_provider_library(group: argparse._ActionsContainer) -> None:
    """Declare where plug-in providers come from."""
    group.add_argument(
        "--provider-library",
        dest="provider_libraries",
        action="append",
        metavar="NAME=PATH",
        help="load an execution provider from this library, and call it NAME; its code runs here, "
        "so use one that you trust",
    )


def _add_speculation(group: argparse._ActionsContainer) -> None:
    guess = (
        "guess the next tokens from the text so far, and compute several in a step while that pays: "
        "on, which may change answers by rounding, off, or the most to guess for a step (default: "
        "auto, on if preparing the bundle found that steps of several round as steps of one)"
    )
    group.add_argument("--speculate", type=speculation, default="auto", metavar="WHEN", help=guess)
    draft = (
        "a smaller bundle with the same tokenizer, which guesses, too, as --speculate on does; it "
        "takes part of --memory"
    )
    group.add_argument("--draft", metavar="BUNDLE", help=draft)
    exact = (
        "do not guess, or batch, where a step of several tokens rounds otherwise than steps of one"
    )
    group.add_argument("--exact", action="store_true", help=exact)


def speculation(text: str) -> Speculate:
    """Value of the option --speculate; argparse reports a ValueError as a bad value."""
    known: dict[str, Speculate] = {"auto": "auto", "on": True, "off": False}
    return known[text] if text in known else int(text)


def _add_rows(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    reads = "how records are read from flash (default: pread)"
    add("--reads", choices=READ_MODES, default="pread", help=reads)
    slots = "tokens whose rows the row cache holds (default: all that fit)"
    add("--slots", type=int, metavar="N", help=slots)
    add("--resident", action="store_true", help="read all tables into memory first")
    overlap = "do not read rows ahead; the text is the same"
    add("--no-overlap", dest="overlap", action="store_false", help=overlap)
    warm = "begin with an empty row cache, and do not count which tokens are used"
    add("--no-warm-start", dest="warm_start", action="store_false", help=warm)
    later = "leave the tables of a bundle on a hub (hf:org/name) there, and read rows when they are used"
    add("--tables-later", action="store_true", help=later)
    flash = "delay reads as this kind of flash would, for comparisons"
    add("--emulate-flash", choices=FLASH_NAMES, help=flash)
    add_tables(group)
    tier = "how much of tables elsewhere to keep on disk, or 0 (default: 1GB, or a tenth of what is free)"
    add("--disk-tier", metavar="SIZE", help=tier)


def add_tables(group: argparse._ActionsContainer) -> None:
    """Declare where the shards of the tables are."""
    url = "read rows from here (https://..., s3://..., a path): the folder tables.zarr of the same bundle"
    group.add_argument("--tables", metavar="URL", help=url)


def _add_prepared(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    prefill = (
        "run prompts through the int8 graph, or never (default: if it is as exact here as where it "
        "was exported, and not slower)"
    )
    add("--prefill-graph", action=argparse.BooleanOptionalAction, help=prefill)
    prepare = "do not keep a backbone rearranged for this processor"
    add("--no-prepare", dest="prepare", action="store_false", help=prepare)
    add_cache_dir(group)


def add_prompt_cache(group: argparse._ActionsContainer) -> None:
    """Declare where prompts are kept, for commands that answer them."""
    kept = (
        "keep prompts in files, which tell what was asked, and go on from them in later runs (default "
        "of DIR: a folder in the user's cache folder). Write --prompt-cache=DIR, or --prompt-cache "
        "after BUNDLE and PROMPT, because a word behind it is taken for DIR"
    )
    group.add_argument("--prompt-cache", nargs="?", const=True, metavar="DIR", help=kept)


def add_cache_dir(group: argparse._ActionsContainer) -> None:
    """Declare where stem-edge keeps what makes later runs faster."""
    folder = "use this folder instead of the user's cache folder"
    group.add_argument("--cache-dir", metavar="DIR", help=folder)


def loading_options(args: argparse.Namespace) -> LoadKeywords:
    """Values of the options of this module, as keywords of stem_edge.load. Raises InputError."""
    given = {action.dest: getattr(args, action.dest) for action in _actions(add_loading)}
    given["prompt_cache"] = getattr(args, "prompt_cache", None)
    return cast(LoadKeywords, given | device_options(args))


def device_options(args: argparse.Namespace) -> DeviceKeywords:
    """Values of the options of add_providers, as keywords of stem_edge.load. Raises InputError."""
    return {
        "providers": parse_providers(args.providers),
        "provider_libraries": parse_libraries(args.provider_libraries),
        "device_memory": args.device_memory,
        "host_slots": args.host_slots,
    }


def changed_options(
    args: argparse.Namespace, add: Callable[[argparse.ArgumentParser], None] = add_loading
) -> list[str]:
    """Options that `add` declares and that do not have their default value, as they are typed."""
    options = (action for action in _actions(add) if action.option_strings)
    return [a.option_strings[0] for a in options if getattr(args, a.dest) != a.default]


def _actions(add: Callable[[argparse.ArgumentParser], None]) -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return parser._actions


def parse_libraries(given: Sequence[str] | None) -> dict[str, str] | None:
    """Paths of provider libraries by name; None if none is given. Raises InputError."""
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
