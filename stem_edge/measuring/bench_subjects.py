"""What a bundle is compared with: names after --against -> engines, what they load, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from stem_edge.bundle import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.formats import EngineName
from stem_edge.measuring.workers import Subject
from stem_edge.runtime.engine import LEAST_CHUNK
from stem_edge.runtime.engines import check_installed, choose_engine
from stem_edge.runtime.flash import FlashName, open_flash
from stem_edge.runtime.options import DeviceKeywords

# What may follow --against, and what it means.
AGAINST = {
    "resident": "the same bundle with all tables in memory, of the device if it runs on one",
    "flash=NAME": "the same bundle on emulated flash",
    "dense=BUNDLE": "another bundle in the same engine",
    "block=BUNDLE": "the same, where only the block size differs",
    "llama.cpp[=TYPE]": "dense models of the same shape: Q4_0, Q4_0-pure, Q4_K_M (all three), "
    "Q5_K_M, Q6_K, ...",
    "torch": "the public trainer's way of computing, in bfloat16",
    "unprepared": "the same bundle without a prepared backbone",
    "mmap": "the same bundle, records read through a mapping",
    "plain": "the same bundle, no rows read ahead",
    "cpu": "the same bundle on the CPU, where it runs on another provider",
    "onnxruntime": "the same bundle on onnxruntime",
    "ggml": "the same bundle on ggml",
    "repacked": "the same bundle on ggml, matrices rearranged in memory",
}
WAYS: dict[str, dict[str, Any]] = {
    "unprepared": {"prepare": False},
    "mmap": {"reads": "mmap"},
    "plain": {"overlap": False},
    "onnxruntime": {},
    "ggml": {},
    "repacked": {"repack": True},
}
# Options of load that are for accelerators. The bundle "resident" gets all memory of the device.
DEVICE = ("providers", "provider_libraries", "device_memory", "host_slots")
UNLIMITED = 1 << 62
SLOTS_OF_VOCABULARY = 100  # one slot for so many tokens: a row cache of 1 %


@dataclass(frozen=True)
class Common:
    """What all subjects share."""

    bundle: Bundle
    engine: EngineName
    options: dict[str, Any]  # others of stem_edge.load
    threads: int
    work: Path  # GGUF files are made there


def load_options(
    bundle: Bundle,
    slots: int | None,
    memory: str | int | None,
    emulate_flash: str | None,
    *,
    repack: bool = False,
    device: DeviceKeywords | None = None,
) -> dict[str, Any]:
    """How stem-edge loads the bundle: with a row cache of 1 %, unless it is told otherwise.

    device: those of DEVICE that are wanted.
    """
    options: dict[str, Any] = {} if memory is None else {"memory": memory}
    options |= {name: value for name, value in (device or {}).items() if value is not None}
    if libraries := options.get("provider_libraries"):  # which go to another process, as text
        options["provider_libraries"] = {name: str(path) for name, path in libraries.items()}
    limit = options.get("device_memory") if on_device(options) else memory
    if repack:
        options["repack"] = True
    if slots is not None:
        options["slots"] = slots
    elif bundle.manifest.tables is not None and limit is None:
        records = bundle.manifest.model.records
        options["slots"] = min(records, max(LEAST_CHUNK, records // SLOTS_OF_VOCABULARY))
    if emulate_flash is not None:
        options["emulate_flash"] = _flash_name(emulate_flash)
    return options


def on_device(options: Mapping[str, Any]) -> bool:
    """Whether options of load put the backbone on a device, or on the CPU playing one."""
    return options.get("providers") is not None or options.get("device_memory") is not None


def make_subjects(common: Common, against: Iterable[str]) -> list[Subject]:
    """The bundle, and what it is compared with, each once.

    Raises InputError for a name that is not known, BackendError if an engine is not installed.
    """
    subjects = [_bundle("bundle", common.bundle, common.engine, common.options)]
    for wanted in against:
        subjects += _compared(wanted, common)
    return list({subject.name: subject for subject in subjects}.values())


def _compared(wanted: str, common: Common) -> list[Subject]:
    name, _, value = wanted.partition("=")
    bundle, engine, options = common.bundle, common.engine, common.options
    match name, bool(value):
        case (("dense" | "block"), True):
            other = open_bundle(value)
            kept = ("repack", *DEVICE[:3])
            rest = {key: each for key, each in options.items() if key in kept}
            options = rest if other.manifest.tables is None else options
            return [_bundle(wanted, other, engine, options)]
        case "flash", True:
            flash = {"emulate_flash": _flash_name(value)}
            return [_bundle(wanted, bundle, engine, options | flash)]
        case "resident", False:
            return [_bundle(wanted, bundle, engine, _resident(options))]
        case "cpu", False if not on_device(options):
            raise InputError(
                "--against cpu: the bundle runs on the CPU itself; leave it out, or name another "
                "provider with --providers"
            )
        case "cpu", False:
            rest = {key: each for key, each in options.items() if key not in DEVICE}
            return [_bundle(wanted, bundle, engine, rest)]
        case (("onnxruntime" | "ggml" | "repacked"), False):
            left = ("repack",) if name == "onnxruntime" else ("repack", *DEVICE)
            rest = {key: each for key, each in options.items() if key not in left}
            engine = "onnxruntime" if name == "onnxruntime" else "ggml"
            return [_bundle(wanted, bundle, engine, rest | WAYS[name])]
        case "unprepared", False if engine != "onnxruntime" or on_device(options):
            accelerated = engine == "onnxruntime"
            raise InputError(
                "--against unprepared: nothing is prepared on "
                f"{'accelerators' if accelerated else engine}; leave it out, or "
                f"{'run it on the CPU' if accelerated else 'add --engine onnxruntime'}"
            )
        case (("unprepared" | "mmap" | "plain"), False):
            return [_bundle(wanted, bundle, engine, options | WAYS[name])]
        case "torch", False:
            _need("torch", name)
            return [Subject(wanted, name, str(bundle.path.resolve()))]
        case "llama.cpp", _:
            return _llama(common, value)
    raise InputError(f"--against {wanted} is not known; expected one of {', '.join(AGAINST)}")


def _resident(options: dict[str, Any]) -> dict[str, Any]:
    """With every table in memory: a limit of the device's is for the row cache."""
    rest = {key: each for key, each in options.items() if key != "slots"} | {"resident": True}
    if on_device(options):
        rest["host_slots"] = 0  # there is nothing that it would be asked for
    if "device_memory" in options:
        rest["device_memory"] = UNLIMITED
    return rest


def _bundle(name: str, bundle: Bundle, engine: EngineName, options: dict[str, Any]) -> Subject:
    check_installed(bundle, choose_engine(bundle, engine))
    path = str(bundle.path.resolve())
    return Subject(name, "stem-edge", path, options | {"engine": engine})


def _flash_name(name: str) -> FlashName:
    open_flash(cast(FlashName, name))  # raises if it is none
    return cast(FlashName, name)


def _llama(common: Common, kind: str) -> list[Subject]:
    """Dense models of the bundle's shape for llama.cpp, made in the work folder."""
    for package in ("llama_cpp", "gguf"):
        _need(package, "llama.cpp")
    from stem_edge.measuring.engine_llama import TYPES, USUAL, make_model

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
