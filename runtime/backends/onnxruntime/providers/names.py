"""Names of execution providers: those that users may give, onnxruntime's, and who ships each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from stem_edge.errors import InputError
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU_NAME, ort

# A name, or names in order of preference, each alone or with options; None for the CPU.
Wanted: TypeAlias = "str | Sequence[str | tuple[str, Mapping[str, object]]] | None"
Libraries: TypeAlias = "Mapping[str, str | Path] | None"

AUTO, CPU = "auto", "cpu"
ELSEWHERE = ("azure",)  # never offered, because it sends the work to other machines
SUFFIX = "ExecutionProvider"
# Tried by "auto" in this order, after the libraries that the user names.
PREFERRED = ("cuda", "webgpu", "openvino", "qnn")


@dataclass(frozen=True)
class Known:
    """A provider that has a short name here."""

    full: str  # onnxruntime's name
    bring: str  # how to install it, as part of an error
    module: str | None = None  # Python module of a plug-in package, which knows its library
    memory: str = ""  # onnxruntime's device name, if it is built in and arrays can lie there


def _over(package: str, before: str = "") -> str:
    """Explain how to install a package that holds all of onnxruntime and one more provider.

    It has the same module and files as onnxruntime. Installed beside that, the one that pip writes
    last wins, and uninstalling either removes files of both.
    """
    return (
        f"it is in {package}, which must be installed over onnxruntime: {before}pip install "
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
        _over("onnxruntime-gpu") + "; TensorRT's own libraries must be installed, too",
        memory="cuda",
    ),
    "rocm": Known("ROCM" + SUFFIX, _over("onnxruntime-rocm")),
    "migraphx": Known("MIGraphX" + SUFFIX, _over("onnxruntime-migraphx")),
    "directml": Known("Dml" + SUFFIX, _over("onnxruntime-directml") + " (Windows)"),
    "cpu": Known(CPU_NAME, "it is in every onnxruntime"),
}
ALIASES = {"dml": "directml"}


def short_name(name: str) -> str:
    """Return the short name, in lower case, for a full name, short name or alias."""
    small = name.lower()
    full = {known.full.lower(): short for short, known in KNOWN.items()}.get(small)
    return full or ALIASES.get(small) or small.replace(SUFFIX.lower(), "")


def full_names() -> list[str]:
    """Return onnxruntime's names of the providers that it knows, installed or not."""
    return [*ort.get_all_providers(), *(known.full for known in KNOWN.values())]


def named(wanted: Wanted) -> list[tuple[str, dict[str, str]]]:
    """Return names and options in the option `providers` of stem_edge.load. Raises InputError."""
    if wanted is None:
        return [(CPU, {})]
    if not isinstance(wanted, (str, Sequence)):
        raise InputError(f"providers is {wanted!r}; expected a name, or a list of names")
    pairs = [_pair(item) for item in ([wanted] if isinstance(wanted, str) else wanted)]
    names = [name for name, _ in pairs]
    if not names:
        raise InputError('providers is empty; leave it out for the CPU, or give "auto"')
    if AUTO in names and pairs != [(AUTO, {})]:
        raise InputError(
            f'providers has "{AUTO}" beside others or with options; give "{AUTO}" alone, or names'
        )
    if any(short_name(name) == CPU for name in names[:-1]):
        raise InputError(
            "providers has cpu before others, which would leave them nothing to do; put it last, "
            "where it runs the operators that the others lack"
        )
    return pairs


def _pair(item: object) -> tuple[str, dict[str, str]]:
    """Return name and options of an item of `providers`."""
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
    """Return an option's value as the string that onnxruntime takes."""
    if not isinstance(key, str) or not key:
        raise InputError(f"providers: {name} has an option named {key!r}; expected a string")
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InputError(
        f"providers: {key} of {name} is {value!r}; expected a string, a number, True or False"
    )


def checked_libraries(libraries: Libraries) -> dict[str, str | Path]:
    """Return the paths of plug-in libraries by their names in lower case. Raises InputError."""
    found: dict[str, str | Path] = {}
    for name, path in (libraries or {}).items():
        if not isinstance(name, str) or not name or not isinstance(path, (str, Path)) or not path:
            raise InputError(
                f"provider_libraries has {name!r}: {path!r}; expected a name and a library's path"
            )
        if name.lower() in (AUTO, CPU):
            raise InputError(f"provider_libraries has a library named {name}; choose another name")
        found[name.lower()] = path
    return found
