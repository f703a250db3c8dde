"""What is measured: a bundle, and what names after --against stand for beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

from stem_edge.bundle.manifest import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import EngineName
from stem_edge.measuring.run.workers import Subject
from stem_edge.runtime.backends.engines import check_installed, choose_engine
from stem_edge.runtime.backends.options import EngineChoice, LoadOptions
from stem_edge.runtime.rows.flash import FlashName, open_flash

# Options of load that are for accelerators, and that a dense model has no use for.
DEVICE = ("providers", "provider_libraries", "device_memory", "host_slots")
OF_ROWS = ("memory", "slots", "host_slots", "resident", "emulate_flash")
APART = ("engine", "threads", "context_length")
UNLIMITED = 1 << 62


class Way(NamedTuple):
    """Another way to run the same bundle."""

    what: str
    options: Mapping[str, object] = {}  # more of them
    without: tuple[str, ...] = ()
    engine: EngineName | None = None


# What may follow --against, and what it means.
WAYS = {
    "resident": Way(
        "the same bundle with all tables in memory, of the device if it runs on one",
        {"resident": True},
        without=("slots",),
    ),
    "unprepared": Way("the same bundle without a prepared backbone", {"prepare": False}),
    "mmap": Way("the same bundle, records read through a mapping", {"reads": "mmap"}),
    "plain": Way("the same bundle, no rows read ahead", {"overlap": False}),
    "cpu": Way("the same bundle on the CPU, where it runs on another provider", without=DEVICE),
    "onnxruntime": Way("the same bundle on onnxruntime", without=("repack",), engine="onnxruntime"),
    "ggml": Way("the same bundle on ggml", without=("repack", *DEVICE), engine="ggml"),
    "repacked": Way(
        "the same bundle on ggml, matrices rearranged in memory", {"repack": True}, DEVICE, "ggml"
    ),
}
AGAINST = {name: way.what for name, way in WAYS.items()} | {
    "flash=NAME": "the same bundle on emulated flash",
    "dense=BUNDLE": "another bundle in the same engine",
    "block=BUNDLE": "the same, where only the block size differs",
    "llama.cpp[=TYPE]": "dense models of the same shape: Q4_0, Q4_0-pure, Q4_K_M (all three), "
    "Q5_K_M, Q6_K, ...",
    "torch": "the public trainer's way of computing, in bfloat16",
}


@dataclass(frozen=True)
class Common:
    """What all subjects share."""

    bundle: Bundle
    engine: EngineName
    options: dict[str, Any]  # others of stem_edge.load
    threads: int
    work: Path  # GGUF files are made there


def load_options(options: LoadOptions) -> dict[str, Any]:
    """Options of load that differ from what it does anyway, as JSON can hold them.

    Without engine, threads and context, which a subject has apart.
    """
    defaults = LoadOptions()
    found = {
        name: value
        for name, value in vars(options).items()
        if name not in APART and value != getattr(defaults, name)
    }
    if libraries := options.provider_libraries:
        found["provider_libraries"] = {name: str(path) for name, path in libraries.items()}
    return found


def on_device(options: Mapping[str, Any]) -> bool:
    """Whether options of load put the backbone on a device, or on the CPU playing one."""
    return options.get("providers") is not None or options.get("device_memory") is not None


def bundle_subject(
    name: str, bundle: Bundle, engine: EngineChoice, options: dict[str, Any]
) -> Subject:
    """A bundle on an engine. Raises BackendError if it has no backbone for it, or it is missing."""
    chosen = choose_engine(bundle, engine)
    check_installed(bundle, chosen)
    return Subject(name, "stem-edge", str(bundle.path.resolve()), options | {"engine": chosen})


def make_subjects(common: Common, against: Iterable[str]) -> list[Subject]:
    """The bundle, and what it is compared with, each once.

    Raises InputError for a name that is not known, BackendError if an engine is not installed.
    """
    subjects = [bundle_subject("bundle", common.bundle, common.engine, common.options)]
    for wanted in against:
        subjects += _compared(wanted, common)
    return list({subject.name: subject for subject in subjects}.values())


def _compared(wanted: str, common: Common) -> list[Subject]:
    name, _, value = wanted.partition("=")
    bundle, engine, options = common.bundle, common.engine, common.options
    match name, bool(value):
        case (("dense" | "block"), True):
            bundle = open_bundle(value)
            options = options if bundle.manifest.tables else _without(options, *OF_ROWS)
        case "flash", True:
            open_flash(cast(FlashName, value))  # raises if it is none
            options = options | {"emulate_flash": value}
        case "torch", False:
            _need("torch", name)
            return [Subject(wanted, name, str(bundle.path.resolve()))]
        case "llama.cpp", _:
            return _llama(common, value)
        case known, False if known in WAYS:
            engine, options = _way(name, engine, options)
        case _:
            raise InputError(
                f"--against {wanted} is not known; expected one of {', '.join(AGAINST)}"
            )
    return [bundle_subject(wanted, bundle, engine, options)]


def _way(
    name: str, engine: EngineName, options: dict[str, Any]
) -> tuple[EngineName, dict[str, Any]]:
    """Engine and options of another way to run the same bundle. Raises InputError if it is none."""
    way, device = WAYS[name], on_device(options)
    if name == "cpu" and not device:
        raise InputError(
            "--against cpu: the bundle runs on the CPU itself; leave it out, or name another "
            "provider with --providers"
        )
    if name == "unprepared" and (engine != "onnxruntime" or device):
        accelerated = engine == "onnxruntime"
        raise InputError(
            "--against unprepared: nothing is prepared on "
            f"{'accelerators' if accelerated else engine}; leave it out, or "
            f"{'run it on the CPU' if accelerated else 'add --engine onnxruntime'}"
        )
    options = _without(options, *way.without) | dict(way.options)
    if name == "resident" and device:
        # What the host tier would be asked for is in the slots; a limit is for them.
        limit = {"device_memory": UNLIMITED} if "device_memory" in options else {}
        options |= {"host_slots": 0, **limit}
    return way.engine or engine, options


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _llama(common: Common, kind: str) -> list[Subject]:
    """Dense models of the bundle's shape for llama.cpp, made in the work folder."""
    for package in ("llama_cpp", "gguf"):
        _need(package, "llama.cpp")
    from stem_edge.measuring.run.engine_llama import TYPES, USUAL, make_model

    if kind and kind not in TYPES:
        raise InputError(f"--against llama.cpp={kind}; expected one of {', '.join(TYPES)}")
    subjects = []
    for each in [kind] if kind else USUAL:
        try:
            common.work.mkdir(parents=True, exist_ok=True)
            path = make_model(common.work, common.bundle.manifest.model, each, common.threads)
        except OSError as error:
            raise InputError(
                f"{common.work}: cannot write a model for llama.cpp there ({error.strerror}); "
                "give another folder with --work"
            ) from error
        subjects.append(Subject(f"llama.cpp {each}", "llama.cpp", str(path)))
    return subjects


def _need(package: str, engine: str) -> None:
    if find_spec(package) is None:
        raise BackendError(
            f"--against {engine} needs the package {package}; "
            "install it with: pip install 'stem-edge[bench]'"
        )
