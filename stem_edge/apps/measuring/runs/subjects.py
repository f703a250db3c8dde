"""Models that `measure` runs: a bundle, the same with other options, other bundles, GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from stem_edge.apps.measuring.runs.workers import Subject
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.backends.engines import choose_engine
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import open_or_make

# Options of load that a dense model does not use; and options that all subjects share.
OF_ROWS = ("memory", "slots", "resident", "emulate_flash")
APART = ("threads", "context_length")
GGUF_SUFFIX = ".gguf"
# MODE in an argument FILE.gguf,MODE -> options of LlamaModel.
LLAMA_MODES = {
    "lazy": {"lazy": True},
    "no-lazy": {"lazy": False},
    "no-repack": {"repack": False},
}


def make_subjects(
    bundle: Bundle, options: LoadOptions, cases: Iterable[str], against: Iterable[str]
) -> list[Subject]:
    """Return the models to measure, without duplicates: the bundle, its cases, and `against`.

    cases: changes of `options`, like "engine=ggml". against: other bundles, or GGUF files. Raises
    InputError for an unknown name, BackendError if llama.cpp is not installed.
    """
    found = [_subject("bundle", bundle, options)]
    found += [_subject(words, bundle, _changed(words, options)) for words in cases]
    found += [_other(words, options) for words in against]
    return list({subject.name: subject for subject in found}.values())


def _changed(words: str, options: LoadOptions) -> LoadOptions:
    """Return options of load, changed by "NAME=VALUE,...". Raises InputError."""
    types, changes = get_type_hints(LoadOptions), dict[str, Any]()
    for word in words.split(","):
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in types or name in APART:
            known = ", ".join(sorted({*types} - {*APART}))
            raise InputError(f"--cases {words}: {name!r} is no option; expected one of {known}")
        try:
            changes[name] = msgspec.convert(value if equals else True, types[name], strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"--cases {words}: {name} is {value!r} ({error})") from error
    return replace(options, **changes)


def _other(words: str, options: LoadOptions) -> Subject:
    """Return the bundle or GGUF file of an --against argument, to measure it. Raises InputError."""
    path, *modes = words.split(",")
    if path.endswith(GGUF_SUFFIX):
        return _llama(words, Path(path), modes)
    bundle, usual = open_or_make(words), LoadOptions()
    if bundle.manifest.tables is None:
        options = replace(options, **{name: getattr(usual, name) for name in OF_ROWS})
    return _subject(words, bundle, options)


def _subject(name: str, bundle: Bundle, options: LoadOptions) -> Subject:
    engine = choose_engine(bundle, options.engine)
    return Subject(
        name, "stem-edge", str(bundle.path.resolve()), load_options(options) | {"engine": engine}
    )


def load_options(options: LoadOptions) -> dict[str, Any]:
    """Return the options of load that differ from its defaults, as values for JSON."""
    defaults = LoadOptions()
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in APART and value != getattr(defaults, name)
    }


def _llama(words: str, path: Path, modes: list[str]) -> Subject:
    if find_spec("llama_cpp") is None:
        raise BackendError(
            f"--against {words} needs the package llama_cpp; "
            "install it with: pip install 'stem-edge[bench]'"
        )
    if not path.is_file():
        raise InputError(f"--against {words}: no such file; give a GGUF file")
    if unknown := [mode for mode in modes if mode not in LLAMA_MODES]:
        raise InputError(
            f"--against {words}: mode {unknown[0]!r} is not known; expected {', '.join(LLAMA_MODES)}"
        )
    options = {name: on for mode in modes for name, on in LLAMA_MODES[mode].items()}
    return Subject(words, "llama.cpp", str(path.resolve()), options)
