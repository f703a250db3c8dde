"""Execution providers: names, packages, libraries, and the errors if they cannot start."""

import _ctypes
import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import stem_edge
from stem_edge.commands.main import main
from stem_edge.commands.options import loading as loading_cli
from stem_edge.errors import (
    BackendError,
    InputError,
    MissingOperatorsError,
)
from stem_edge.graph.encoder import encode
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.runtime.backends.onnxruntime.providers import start as provider_start
from stem_edge.runtime.backends.onnxruntime.providers.names import KNOWN, Wanted, short_name
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.resolve import has_own_memory, resolve
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    REFUSED,
    GraphSource,
    open_session,
    products_saturate,
)
from stem_edge.runtime.backends.onnxruntime.providers.start import check_starts
from stem_edge.system import nvidia

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
CUDA = KNOWN["cuda"].full
# Messages of onnxruntime-gpu 1.31.1 about missing libraries.
NO_CUBLAS = (
    "Failed to load libcublasLt.so.13: libcublasLt.so.13: cannot open shared object file: No such "
    "file or directory\nPlease follow https://onnxruntime.ai/docs/install/#cuda-and-cudnn to install "
    "CUDA."
)
NO_CUDNN = (
    "[ONNXRuntimeError] : 1 : FAIL : Failed to load library /x/libonnxruntime_providers_cuda.so with "
    "error: libcudnn.so.9: cannot open shared object file: No such file or directory"
)
NO_CPU = (
    "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are assigned to the "
    "default CPU EP, but fallback to CPU EP has been explicitly disabled by the user."
)


def attention() -> Graph:
    """Return a graph of an operator that few providers have."""
    graph = Graph()
    names = [graph.input(name, np.float32, [1, 1, 8]) for name in ("q", "k", "v")]
    names += [graph.input(name, np.float32, [1, 1, 8, 8]) for name in ("keys", "values")]
    names += [graph.input("seqlens_k", np.int32, [1]), graph.input("total", np.int32, [])]
    outputs = ["mixed", "new_keys", "new_values"]
    graph.node("GroupQueryAttention", names, outputs, CONTRIB, num_heads=1, kv_num_heads=1)
    for output, shape in zip(outputs, ([1, 1, 8], [1, 1, 8, 8], [1, 1, 8, 8]), strict=True):
        graph.output(output, np.float32, shape)
    return graph


ATTENTION = GraphSource("attention", encode(attention()), Path())


@dataclass
class Device:
    """A fake OrtEpDevice."""

    ep_name: str
    library: str = ""
    kind: str = "GPU"
    memory: bool = True
    ep_options: dict[str, str] = field(default_factory=dict)

    @property
    def ep_metadata(self) -> dict[str, str]:
        return {provider_start.LIBRARY_PATH: self.library} if self.library else {}

    @property
    def device(self) -> Any:
        return SimpleNamespace(
            type=SimpleNamespace(name=self.kind),
            vendor="Maker",
            vendor_id=1,
            device_id=2,
            metadata={"Description": "Maker's card"},
        )

    def memory_info(self, kind: Any) -> object:
        return object() if self.memory else None


@dataclass
class Machine:
    """A fake onnxruntime: built-in providers, devices, and the devices of plug-in libraries."""

    built_in: list[str] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    libraries: dict[str, list[Device]] = field(default_factory=dict)
    registered: list[tuple[str, str]] = field(default_factory=list)
    packages: dict[str, Path] = field(default_factory=dict)

    def register(self, name: str, path: str) -> None:
        if any(name == known for known, _ in self.registered):
            raise RuntimeError(f"EP library is already registered under {name}")
        self.registered.append((name, path))
        self.devices += self.libraries[path]

    def brings(self, path: Path, *devices: Device) -> Path:
        """Make a file that registers these devices."""
        path.write_bytes(provider_start.MAGICS[0])
        for device in devices:
            device.library = str(path)
        self.libraries[str(path)] = list(devices)
        return path


@pytest.fixture
def machine(monkeypatch: Patch) -> Machine:
    found = Machine()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [*found.built_in, CPU.full])
    monkeypatch.setattr(ort, "get_ep_devices", lambda: found.devices)
    monkeypatch.setattr(ort, "register_execution_provider_library", found.register)
    monkeypatch.setattr(provider_start, "package_library", found.packages.get)
    return found


@pytest.mark.parametrize("wanted", [None, "cpu", "CPU", "CPUExecutionProvider", ["cpu"], " cpu "])
def test_the_cpu_has_several_names(wanted: Wanted) -> None:
    assert resolve(wanted) == (CPU,)
    assert CPU.on_cpu
    assert not has_own_memory(CPU)


INVALID: list[tuple[Any, str]] = [
    ([], "providers is empty; leave it out"),
    ("", "empty name"),
    (["cpu", "cpu"], "cpu before others"),
    (["CPUExecutionProvider", "webgpu"], "cpu before others"),
    (["auto", "cpu"], '"auto" beside others or with options'),
    ([("auto", {"a": 1})], '"auto" beside others or with options'),
    ([("cpu", {"a": 1})], "cpu has no options, but a is given"),
    ("wepgpu", "'wepgpu', which onnxruntime .* did you mean webgpu"),
    ("NoSuchExecutionProvider", "does not know; expected cuda, webgpu"),
    ([("cuda", {1: 2})], "cuda has an option named 1; expected a string"),
    ([("cuda", {"a": [1]})], r"a of cuda is \[1\]; expected a string, a number"),
    ([("cuda", {"a": None})], "a of cuda is None"),
    ([("cuda",)], r"\('cuda',\); expected a name, or a name and its options"),
    ([7], "has 7; expected a name"),
    (5, "providers is 5; expected a name"),
    ({"cuda"}, "providers is {'cuda'}; expected a name"),
]
ABSENT: list[tuple[Any, str]] = [  # which name their package
    ("cuda", r'pip install "stem-edge\[cuda\]" && pip install .* onnxruntime-gpu; available'),
    ("CUDAExecutionProvider", r"cuda is not available: .*stem-edge\[cuda\]"),
    ("webgpu", r'pip install "stem-edge\[webgpu\]"; available here: cpu$'),
    ("coreml", "onnxruntime's package for macOS"),
    ("openvino", "onnxruntime-ep-openvino"),
    ("qnn", "onnxruntime-qnn"),
    ("dml", "directml is not available: .*onnxruntime-directml"),
    ("tensorrt", "onnxruntime-gpu.*TensorRT's own libraries"),
    ("Xnnpack", "xnnpack is not available: no installed package has it"),
]


@pytest.mark.parametrize(
    ("wanted", "message", "error"),
    [
        *((wanted, message, InputError) for wanted, message in INVALID),
        *((wanted, message, BackendError) for wanted, message in ABSENT),
    ],
)
def test_invalid_and_absent_providers_are_refused(
    machine: Machine, wanted: Any, message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve(wanted)
    assert "\n" not in str(caught.value)


def test_a_plug_in_package_is_registered_once_and_gets_its_options(
    machine: Machine, tmp_path: Path
) -> None:
    full = KNOWN["webgpu"].full
    weak, strong = Device(full, kind="CPU", memory=False), Device(full)
    other = Device(full + ".AUTO")
    library = machine.brings(tmp_path / "lib.so", weak, other, strong)
    machine.packages["onnxruntime_ep_webgpu"] = library
    wanted: Wanted = [("WebGPU", {"a": 1, "b": True, "c": "x"}), "cpu"]
    for _ in range(2):
        found, last = resolve(wanted)
        expected = Provider("webgpu", full, {"a": "1", "b": "1", "c": "x"}, (strong,))
        assert (found, last) == (expected, CPU)
    assert has_own_memory(found)
    assert not found.on_cpu
    assert machine.registered == [(full, str(library))]
    with pytest.raises(InputError, match="webgpu more than once"):
        resolve(["webgpu", full])


def test_a_library_of_the_users_own(machine: Machine, tmp_path: Path) -> None:
    device = Device("MineExecutionProvider", kind="NPU", memory=False)
    library = machine.brings(tmp_path / "mine.dll", device)
    (found,) = resolve("Mine", {"mine": library})
    assert found == Provider("mine", "MineExecutionProvider", {}, (device,))
    assert not has_own_memory(found)
    # Once it is registered, onnxruntime's own name works, too.
    assert resolve("mineexecutionprovider")[0].full == "MineExecutionProvider"
    machine.brings(tmp_path / "none.so")
    with pytest.raises(BackendError, match=r"mine: .*none.so finds no device here"):
        resolve("mine", {"mine": tmp_path / "none.so"})
    with pytest.raises(BackendError, match="finds no device here"):  # registered by now
        resolve("mine", {"mine": tmp_path / "none.so"})


@pytest.mark.parametrize("libraries", [{"": "x"}, {"a": ""}, {"a": 1}, {1: "x"}, {"cpu": "x"}])
def test_libraries_are_names_and_paths(libraries: Any) -> None:
    with pytest.raises(InputError, match="provider_libraries has"):
        resolve("a", libraries)


def test_files_that_are_no_provider_library(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("hello")
    for path, message in (
        (tmp_path / "absent.so", "cannot read the provider library"),
        (tmp_path, "cannot read the provider library"),
        (text, "is not a library: it begins with b'hell'"),
        (Path(_ctypes.__file__), "mine: onnxruntime .* cannot use .*plug-in execution provider"),
    ):
        with pytest.raises(BackendError, match=message) as caught:
            resolve("mine", {"mine": path})
        assert "\n" not in str(caught.value)


def test_auto_takes_the_first_that_starts(
    machine: Machine, monkeypatch: Patch, tmp_path: Path
) -> None:
    assert resolve("auto") == resolve(["Auto"]) == (CPU,)
    full = KNOWN["webgpu"].full
    machine.packages["onnxruntime_ep_webgpu"] = machine.brings(tmp_path / "w.so", Device(full))
    machine.packages["onnxruntime_ep_openvino"] = machine.brings(
        tmp_path / "o.so", Device(KNOWN["openvino"].full, memory=False)
    )
    assert [found.name for found in resolve("auto")] == ["webgpu"]
    machine.built_in = [CUDA]
    monkeypatch.setattr(
        "stem_edge.runtime.backends.onnxruntime.providers.start.check_starts", lambda *given: None
    )
    assert [found.name for found in resolve("auto")] == ["cuda"]
    assert has_own_memory(resolve("auto")[0])
    with pytest.raises(InputError, match=r"webgpu, a plug-in, and cuda"):
        resolve(["cuda", "webgpu"])

    def fails(provider: Provider) -> None:
        raise BackendError("no driver")

    monkeypatch.setattr(
        "stem_edge.runtime.backends.onnxruntime.providers.start.check_starts", fails
    )
    assert [found.name for found in resolve("auto")] == ["webgpu"]


def test_auto_does_not_pass_over_a_library_that_is_named(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="mine: cannot read the provider library"):
        resolve("auto", {"mine": tmp_path / "no.so"})


def test_cuda_names_missing_libraries(machine: Machine, monkeypatch: Patch, tmp_path: Path) -> None:
    products_saturate()  # cached before sessions are replaced
    machine.built_in = [CUDA]
    monkeypatch.setattr(provider_start, "NVIDIA_DRIVER", "no-such-driver.so.1")
    with pytest.raises(BackendError, match=r"cuda cannot start here: NVIDIA's driver is missing"):
        resolve("cuda")

    def printing(text: str) -> Callable[[], None]:
        return lambda: print(text)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(ort, "preload_dlls", printing(NO_CUBLAS), raising=False)
    with pytest.raises(BackendError, match=r"libcublasLt.so.13 cannot be loaded; .*\[cuda,cudnn\]"):
        resolve("cuda")
    monkeypatch.setattr(ort, "preload_dlls", printing(""))
    session = SimpleNamespace(get_providers=lambda: [CPU.full])
    monkeypatch.setattr(ort, "InferenceSession", lambda *given, **named: session)
    with pytest.raises(BackendError, match="cuda cannot start here: onnxruntime gives no reason"):
        resolve("cuda")

    def refuse(name: str, path: str) -> None:
        raise RuntimeError(NO_CUDNN)

    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").touch()
    monkeypatch.setattr(ort, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(ort, "register_execution_provider_library", refuse)
    with pytest.raises(BackendError, match=r"error: libcudnn.so.9: cannot open shared object"):
        resolve("cuda")


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_built_in_provider_that_starts() -> None:
    check_starts(CPU)
    with pytest.raises(BackendError, match="none cannot start here"):
        check_starts(Provider("none", "NoneExecutionProvider"))


def test_a_session_names_operators_that_would_go_to_the_cpu() -> None:
    azure = Provider("azure", "AzureExecutionProvider")
    if azure.full not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no provider that lacks operators")
    with pytest.raises(
        MissingOperatorsError, match="azure cannot run GroupQueryAttention"
    ) as caught:
        open_session(ATTENTION, 1, [azure])
    assert caught.value.operators == ("GroupQueryAttention",)
    assert open_session(ATTENTION, 1, [azure, CPU]).get_providers()[0] == azure.full


def test_a_provider_that_onnxruntime_leaves_out_is_no_missing_operator(monkeypatch: Patch) -> None:
    products_saturate()
    assert REFUSED in NO_CPU

    def opened(*given: Any, **named: Any) -> Any:
        if opening.pop():
            raise RuntimeError(NO_CPU)
        return SimpleNamespace(get_providers=lambda: [CPU.full])

    monkeypatch.setattr(ort, "InferenceSession", opened)
    for strict, providers in (
        (True, [Provider("cuda", CUDA)]),
        (False, [Provider("cuda", CUDA), CPU]),
    ):
        opening = [False, strict] if strict else [False]
        with pytest.raises(BackendError, match="did not start cuda and gives no reason") as caught:
            open_session(ATTENTION, 1, providers)
        assert not isinstance(caught.value, MissingOperatorsError)


@pytest.mark.parametrize(
    ("module", "message"),
    [("", "onnxruntime is incomplete"), ("raise ImportError('x')", "cannot be imported (x)")],
)
def test_a_damaged_onnxruntime_is_one_line(tmp_path: Path, module: str, message: str) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(module)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stem_edge\n"
        "try: stem_edge.providers()\nexcept stem_edge.errors.BackendError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert message in done.stdout


def test_short_names() -> None:
    assert short_name("DmlExecutionProvider") == short_name("dml") == "directml"
    assert short_name("OpenVINOExecutionProvider.AUTO") == "openvino.auto"
    assert [short_name(known.full) for known in KNOWN.values()] == list(KNOWN)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("auto", ["auto"]),
        ("coreml,cpu", ["coreml", "cpu"]),
        ("cuda:a=1,b=x:y=z,cpu", [("cuda", {"a": "1", "b": "x:y=z"}), "cpu"]),
        ("cpu,cuda:a=1", ["cpu", ("cuda", {"a": "1"})]),
    ],
)
def test_providers_of_a_command_line(given: str | None, expected: object) -> None:
    assert loading_cli.parse_providers(given) == expected


@pytest.mark.parametrize("given", ["cuda:", "cuda:a", ":a=1", "cuda:a=1,a=2", "cuda:=1"])
def test_bad_options_of_a_command_line(given: str) -> None:
    with pytest.raises(InputError, match="expected NAME or NAME:key=value"):
        loading_cli.parse_providers(given)


def test_libraries_of_a_command_line() -> None:
    assert loading_cli.parse_libraries(["a=/x=y", "b=z"]) == {"a": "/x=y", "b": "z"}
    assert loading_cli.parse_libraries(None) is None
    for given in (["a"], ["=x"], ["a="], ["a=x", "a=y"]):
        with pytest.raises(InputError, match="--provider-library"):
            loading_cli.parse_libraries(given)


def test_inspect_lists_them(machine: Machine, tmp_path: Path, capsys: Capture) -> None:
    machine.devices = [Device(CPU.full, kind="CPU", memory=False)]
    library = machine.brings(tmp_path / "mine.so", Device("MineExecutionProvider"))
    given = ["inspect", "--providers", "--provider-library", f"mine={library}"]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["provider", "devices,", "or", "what", "brings", "it"]
    assert lines[1].split(maxsplit=1) == ["mine", "GPU Maker's card, memory of its own"]
    assert lines[2].split(maxsplit=1) == ["cpu", "CPU Maker's card"]
    rest = {line.split()[0]: line.split()[1] for line in lines[3:]}
    assert set(rest) == set(KNOWN) - {"cpu"}
    assert set(rest.values()) == {"no"}
    assert main([*given, "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["mine"]["full"] == "MineExecutionProvider"
    assert found["mine"]["available"] and found["mine"]["own_memory"]
    assert found["mine"]["devices"][0]["kind"] == "GPU"
    assert "stem-edge[cuda]" in found["cuda"]["reason"]
    assert [listed.name for listed in stem_edge.providers() if listed.available] == [
        "cpu",
        "mine",  # whose library is registered now
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "inspect needs the folder of a BUNDLE, or --providers"),
        (["model", "--providers"], "BUNDLE is given"),
        (["--providers", "model"], "needs a BUNDLE before it"),
        (["model", "--provider-library", "a=b"], "--provider-library belongs to --providers"),
        (["--providers", "--context-length", "3"], "--context-length is given"),
        (["--providers", "--provider-library", "a"], "expected NAME=PATH"),
        (["--providers", "--text", "x"], "--text is given"),
        (["model", "--providers", "webgpu"], "add --memory"),
        (["model", "--device-memory", "1GB"], "add --memory"),
    ],
)
def test_inspect_refuses_contradicting_options(
    capsys: Capture, given: list[str], message: str
) -> None:
    assert main(["inspect", *given]) == 1
    assert message in capsys.readouterr().err


def test_memory_on_a_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert nvidia.nbytes_on_nvidia(1) is None
    monkeypatch.setattr(shutil, "which", lambda name: "nvidia-smi")
    said = SimpleNamespace(stdout="7, 100\n8, 1\n7, 20\n")
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: said)
    assert nvidia.nbytes_on_nvidia(7) == 120 << 20
    assert nvidia.nbytes_on_nvidia(9) is None


@pytest.mark.parametrize("name", ["webgpu", "openvino"])
def test_real_plug_ins(name: str) -> None:
    pytest.importorskip(KNOWN[name].module or "")
    try:
        (found,) = resolve(name)
    except BackendError as error:
        pytest.skip(f"no device for it: {error}")
    assert found.full == KNOWN[name].full and len(found.devices) == 1
    assert resolve([name, "cpu"])[1] == CPU
    assert name in [listed.name for listed in stem_edge.providers() if listed.available]
    if name == "openvino":
        with pytest.raises(MissingOperatorsError, match="openvino cannot run GroupQueryAttention"):
            open_session(ATTENTION, 1, [found])
    else:
        assert open_session(ATTENTION, 1, [found]).get_providers()[0] == found.full
