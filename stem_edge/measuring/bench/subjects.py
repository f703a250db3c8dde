"""Subjects of a bench: the bundle, and what the names after --against stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.measuring.bench.workers import Subject
from stem_edge.runtime.backends.engines import ENGINES, check_installed, choose_engine
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.emulated_flash import open_flash
from stem_edge.runtime.rows.shards import FlashName

# Options of load: those for accelerators, those that a dense model has no use for, and those that
# every subject has apart from its options.
DEVICE = ("providers", "provider_libraries", "device_memory")
OF_ROWS = ("memory", "slots", "resident", "emulate_flash")
APART = ("engine", "threads", "context_length")
UNLIMITED = 1 << 62


class Alternative(NamedTuple):
    """The same bundle with other options, or on another engine."""

    what: str
    options: Mapping[str, object] = {}  # added to those of the bundle
    without: tuple[str, ...] = ()  # names of options that are dropped
    engine: str | None = None


ALTERNATIVES = {
    "resident": Alternative(
        "the same bundle with all tables in memory, that of the device if it runs on one",
        {"resident": True},
        without=("slots",),
    ),
    "unprepared": Alternative("the same bundle without a prepared backbone", {"prepare": False}),
    "plain": Alternative("the same bundle, no rows read ahead", {"overlap": False}),
    "cpu": Alternative(
        "the same bundle on the CPU, if it runs on another provider", without=DEVICE
    ),
    **{
        name: Alternative(f"the same bundle on {name}", without=("repack", *DEVICE), engine=name)
        for name in ENGINES
    },
    "repacked": Alternative(
        "the same bundle on ggml, matrices rearranged in memory",
        {"repack": True},
        without=DEVICE,
        engine="ggml",
    ),
}
# Words that may follow a model of llama.cpp after commas, and the options of LlamaModel.
LLAMA_MODES: dict[str, dict[str, bool]] = {
    "lazy": {"lazy": True},
    "no-lazy": {"lazy": False},
    "no-repack": {"repack": False},
    "unified": {"unified": True},
}
# Words that may follow --against, and what they mean.
AGAINST = {name: alternative.what for name, alternative in ALTERNATIVES.items()} | {
    "flash=NAME": "the same bundle on emulated flash",
    "dense=BUNDLE": "another bundle in the same engine",
    "block=BUNDLE": "the same as dense=BUNDLE, for one in which only the block size differs",
    "llama.cpp=FILE.gguf": "a model that llama.cpp runs, of the same tokenizer: what its own tools "
    "made of the same checkpoint",
    "llama.cpp=FILE.gguf,MODE": "the same with per-layer embeddings read row by row (lazy) or all of them "
    "loaded (no-lazy; without either, llama.cpp decides by their size), with weights used as they lie "
    "in the file (no-repack), or with one KV cache for all sequences of --cases (unified); modes "
    "can be joined: FILE.gguf,lazy,no-repack",
}


@dataclass(frozen=True)
class Common:
    """Settings that all subjects share."""

    bundle: Bundle
    engine: str
    options: dict[str, Any]  # the other options of stem_edge.load


def load_options(options: LoadOptions) -> dict[str, Any]:
    """Return the options of load that differ from its defaults, as JSON can hold them.

    Engine, threads and context are left out, because a subject has them apart.
    """
    defaults = LoadOptions()
    found = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in APART and value != getattr(defaults, name)
    }
    if libraries := options.provider_libraries:
        found["provider_libraries"] = {name: str(path) for name, path in libraries.items()}
    return found


def on_device(options: Mapping[str, Any]) -> bool:
    """Return whether options of load put the backbone on a device, real or emulated."""
    return options.get("providers") is not None or options.get("device_memory") is not None


def bundle_subject(name: str, bundle: Bundle, engine: str, options: dict[str, Any]) -> Subject:
    """Return a bundle on an engine. Raises BackendError if its backbone or the engine is missing."""
    chosen = choose_engine(bundle, engine)
    check_installed(bundle, chosen)
    return Subject(name, "stem-edge", str(bundle.path.resolve()), options | {"engine": chosen})


def make_subjects(common: Common, against: Iterable[str]) -> list[Subject]:
    """Return the bundle and what it is compared with, each once.

    Raises InputError for an unknown name, BackendError if an engine is not installed.
    """
    subjects = [bundle_subject("bundle", common.bundle, common.engine, common.options)]
    for wanted in against:
        subjects += _compared(wanted, common)
    made = list({(subject.name, subject.path): subject for subject in subjects}.values())
    names = [subject.name for subject in made]
    return [each if names.count(each.name) == 1 else _with_path(each) for each in made]


def _with_path(subject: Subject) -> Subject:
    """Return a subject whose name has its whole path instead of the last part."""
    return replace(subject, name=subject.name.replace(Path(subject.path).name, subject.path, 1))


def _compared(wanted: str, common: Common) -> list[Subject]:
    name, _, value = wanted.partition("=")
    bundle, engine, options = common.bundle, common.engine, common.options
    match name, bool(value):
        case (("dense" | "block"), True):
            bundle = open_bundle(value)
            options = options if bundle.manifest.tables else _without(options, *OF_ROWS)
        case "flash", True:
            open_flash(cast(FlashName, value))  # only to raise InputError for an unknown name
            options = options | {"emulate_flash": value}
        case (("torch" | "transformers"), _):
            raise InputError(
                f"--against {wanted}: stem-edge no longer runs {name}; time it in a script of your own, "
                "or compare with llama.cpp"
            )
        case "llama.cpp", True:
            return _llama(value)
        case known, False if known in ALTERNATIVES:
            engine, options = _alternative(name, engine, options)
        case _:
            raise InputError(
                f"--against {wanted} is not known; expected one of {', '.join(AGAINST)}"
            )
    return [bundle_subject(wanted, bundle, engine, options)]


def _alternative(name: str, engine: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return engine and options of an alternative. Raises InputError if it would change nothing."""
    alternative, device = ALTERNATIVES[name], on_device(options)
    if name == "cpu" and not device:
        raise InputError(
            "--against cpu: the bundle runs on the CPU itself; leave out this comparison, or name "
            "another provider with --providers"
        )
    if name == "unprepared" and (device or not ENGINES[engine].ways.expected.PREPARES):
        raise InputError(
            f"--against unprepared: nothing is prepared on {'accelerators' if device else engine}; "
            "leave out this comparison, or run on the CPU with onnxruntime"
        )
    options = _without(options, *alternative.without) | dict(alternative.options)
    if name == "resident" and device:
        # No limit, because it would cap the slots, which hold all records.
        options |= {"device_memory": UNLIMITED} if "device_memory" in options else {}
    return alternative.engine or engine, options


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _llama(value: str) -> list[Subject]:
    """Return a GGUF file that llama.cpp runs."""
    file, *modes = value.split(",")
    if unknown := [mode for mode in modes if mode not in LLAMA_MODES]:
        raise InputError(
            f"--against llama.cpp={value}: mode {unknown[0]!r} is not known; expected "
            f"{', '.join(LLAMA_MODES)}"
        )
    options = {name: on for mode in modes for name, on in LLAMA_MODES[mode].items()}
    _need("llama_cpp")
    if not (path := Path(file)).is_file():
        raise InputError(f"--against llama.cpp={file}: no such file; give a GGUF file")
    name = " ".join(["llama.cpp", path.name, *modes])
    return [Subject(name, "llama.cpp", str(path.resolve()), options)]


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise BackendError(
            f"--against llama.cpp needs the package {package}; "
            "install it with: pip install 'stem-edge[bench]'"
        )
