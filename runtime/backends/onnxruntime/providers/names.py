"""Names of execution providers: what users may say, what is meant, and what brings each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stem_edge.errors import InputError
from stem_edge.runtime.backends.onnxruntime.providers.ort_module import ort

# A name, names in the order of preference, each with its options if need be; None: the CPU.
Wanted: TypeAlias = "str | Sequence[str | tuple[str, Mapping[str, object]]] | None"
Libraries: TypeAlias = "Mapping[str, str | Path] | None"

AUTO, CPU = "auto", "cpu"
CPU_NAME = "CPUExecutionProvider"
ELSEWHERE = ("azure",)  # sends the work to other machines
SUFFIX = "ExecutionProvider"
# What "auto" tries, in this order, after the libraries that the user names.
PREFERRED = ("cuda", "webgpu", "openvino", "qnn")


@dataclass(frozen=True)
class Known:
    """A provider that people ask for by a short name."""

    full: str  # onnxruntime's name
    bring: str  # what brings it, as an error says it
    module: str | None = None  # of a plug-in package: imported to find its library
    memory: str = ""  # built in: its device's memory by onnxruntime's name, where arrays can lie


def _over(package: str, before: str = "") -> str:
    """For packages that hold all of onnxruntime and a provider more: module and files are the same.

    Installed beside onnxruntime, the one that pip writes last is there; and uninstalling either
    takes files of both.
    """
    return (
        f"it is in {package}, which has to lie over onnxruntime: {before}pip install "
        f"--force-reinstall --no-deps {package}"
    )


def _plugin(package: str) -> str:
    return f'it is a plug-in: pip install "{package}"'


KNOWN = {
    "cuda": Known(
        "CUDA" + SUFFIX,
        _over("onnxruntime-gpu", 'pip install "stem-edge[cuda]" && '),
        memory="cuda",
    ),
    "webgpu": Known("WebGpu" + SUFFIX, _plugin("stem-edge[webgpu]"), "onnxruntime_ep_webgpu"),
    "coreml": Known("CoreML" + SUFFIX, "it is in onnxruntime's package for macOS, and only there"),
    "openvino": Known(
        "OpenVINO" + SUFFIX, _plugin("onnxruntime-ep-openvino"), "onnxruntime_ep_openvino"
    ),
    "qnn": Known("QNN" + SUFFIX, _plugin("onnxruntime-qnn"), "onnxruntime_qnn"),
    "tensorrt": Known(
        "Tensorrt" + SUFFIX,
        _over("onnxruntime-gpu") + "; TensorRT's own libraries have to be installed, too",
        memory="cuda",
    ),
    "rocm": Known("ROCM" + SUFFIX, _over("onnxruntime-rocm")),
    "migraphx": Known("MIGraphX" + SUFFIX, _over("onnxruntime-migraphx")),
    "directml": Known("Dml" + SUFFIX, _over("onnxruntime-directml") + " (Windows)"),
    "cpu": Known(CPU_NAME, "it is in every onnxruntime"),
}
ALIASES = {"dml": "directml"}


def short_name(name: str) -> str:
    """The short name of a full, short or other one, in small letters."""
    small = name.lower()
    full = {known.full.lower(): short for short, known in KNOWN.items()}.get(small)
    return full or ALIASES.get(small) or small.replace(SUFFIX.lower(), "")


def full_names() -> list[str]:
    """What onnxruntime calls all the providers that it has ever heard of."""
    return [*ort.get_all_providers(), *(known.full for known in KNOWN.values())]


def named(wanted: Wanted) -> list[tuple[str, dict[str, str]]]:
    """Names and options that `providers` of stem_edge.load asks for. Raises InputError."""
    if wanted is None:
        return [(CPU, {})]
    if not isinstance(wanted, (str, Sequence)):
        raise InputError(f"providers is {wanted!r}; expected a name, or a list of names")
    pairs = [_pair(item) for item in ([wanted] if isinstance(wanted, str) else wanted)]
    names = [name for name, _ in pairs]
    if not names:
        raise InputError('providers is empty; leave it out for the CPU, or say "auto"')
    if AUTO in names and pairs != [(AUTO, {})]:
        raise InputError(
            f'providers has "{AUTO}" with others or options; say "{AUTO}" alone, or names alone'
        )
    if any(short_name(name) == CPU for name in names[:-1]):
        raise InputError(
            "providers has cpu before others, which would leave them nothing to do; put it last, "
            "where it takes the operators that the others lack"
        )
    return pairs


def _pair(item: object) -> tuple[str, dict[str, str]]:
    """Name and options of one item of `providers`."""
    name, options = (item, {}) if isinstance(item, str) else _split(item)
    if not name.strip():
        raise InputError("providers has an empty name; expected one like cuda or webgpu")
    name = AUTO if name.strip().lower() == AUTO else name.strip()
    return name, {key: _text(name, key, value) for key, value in options.items()}


def _split(item: object) -> tuple[str, Mapping[Any, object]]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        name, options = item
        if isinstance(name, str) and isinstance(options, Mapping):
            return name, options
    raise InputError(
        f"providers has {item!r}; expected a name, or a name and its options like "
        "('cuda', {'device_id': 1})"
    )


def _text(name: str, key: object, value: object) -> str:
    """An option's value as onnxruntime takes it."""
    if not isinstance(key, str) or not key:
        raise InputError(f"providers: {name} has an option named {key!r}; expected a text")
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InputError(
        f"providers: {key} of {name} is {value!r}; expected a text, a number, True or False"
    )


def checked_libraries(libraries: Libraries) -> dict[str, str | Path]:
    """Paths by names in small letters. Raises InputError."""
    found: dict[str, str | Path] = {}
    for name, path in (libraries or {}).items():
        if not isinstance(name, str) or not name or not isinstance(path, (str, Path)) or not path:
            raise InputError(
                f"provider_libraries has {name!r}: {path!r}; expected a name and the path of a library"
            )
        if name.lower() in (AUTO, CPU):
            raise InputError(f"provider_libraries has a library named {name}; choose another name")
        found[name.lower()] = path
    return found
