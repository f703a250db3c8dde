"""Names of execution providers, and what brings each."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.runtime.ort_module import ort

AUTO = "auto"
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
    own_memory: bool = False  # built in: whether arrays can lie in memory of its device


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
        own_memory=True,
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
        own_memory=True,
    ),
    "rocm": Known("ROCM" + SUFFIX, _over("onnxruntime-rocm"), own_memory=True),
    "migraphx": Known("MIGraphX" + SUFFIX, _over("onnxruntime-migraphx"), own_memory=True),
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
