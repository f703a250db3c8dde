"""Who may import whom, read from the source; and what importing costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The front door and the command import the halves when they are asked for, by name.
# What measures stands above all others; torch, llama.cpp and checkpoints only where one is asked for.
FORBIDDEN = {
    "stem_edge": {
        "stem_edge.editing",
        "stem_edge.export",
        "stem_edge.runtime",
        "torch",
        "onnx",
        "onnxruntime",
    },
    # What builds graphs knows no bundle, no file and no library that reads them.
    "stem_edge/graph": {
        "stem_edge.bundle.manifest",
        "stem_edge.files.disk",
        "stem_edge.export",
        "stem_edge.runtime",
        "onnx",
        "onnxruntime",
    },
    "export": {"stem_edge.runtime", "stem_edge.measuring", "stem_edge.editing", "onnx"},
    "runtime": {
        "stem_edge.export",
        "stem_edge.measuring",
        "stem_edge.editing",
        "torch",
        "onnx",
        "zarr",
    },
}
ZARR_USER = "mmap_store.py"


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere outside of `if TYPE_CHECKING`."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        nodes += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_forbidden_import(folder: str) -> None:
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        forbidden = FORBIDDEN[folder] | (set() if path.name == ZARR_USER else {"zarr"})
        for name in imports(path):
            hits = [bad for bad in forbidden if name == bad or name.startswith(bad + ".")]
            # The command `stem-edge demo` and the probe go through the package's front door.
            assert not hits, f"{path} imports {name}"


def test_the_unsafe_ways_to_read_a_file_are_not_in_the_tree() -> None:
    for path in [
        p
        for f in (
            "stem_edge",
            "stem_edge/editing",
            "stem_edge/graph",
            "stem_edge/measuring",
            "export",
            "runtime",
        )
        for p in (ROOT / f).glob("*.py")
    ]:
        text = path.read_text("utf-8")
        for bad in ("weights_only=False", "pickle.load(", "pickle.loads(", "eval(", "exec("):
            assert bad not in text, f"{path} has {bad}"


def test_one_function_opens_sessions() -> None:
    """Settings of others would compute other numbers, on processors that nobody here may have."""
    paths = [
        path
        for folder in ("stem_edge", "export", "runtime", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if "InferenceSession" + "(" in path.read_text("utf-8")
    ]
    assert paths == [ROOT / "runtime" / "ort_session.py"]


def loaded_after(code: str) -> set[str]:
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import stem_edge") & {"numpy", "torch", "onnxruntime", "tokenizers"}


@pytest.mark.parametrize("name", ["bench", "eval", "fit", "measure"])
def test_measuring_needs_no_extra(name: str) -> None:
    loaded = loaded_after(f"import stem_edge.measuring.{name}_cli")
    assert not loaded & {"torch", "onnx", "zarr", "matplotlib", "lm_eval", "llama_cpp"}


def test_exporting_needs_torch_for_one_quantizer_only() -> None:
    loaded = loaded_after("import stem_edge.export.exporter")
    assert not loaded & {"torch", "onnx"}


def test_generating_loads_neither_torch_nor_onnx_nor_zarr() -> None:
    code = (
        "from stem_edge.commands.demo import demo_bundle\nimport stem_edge\n"
        "with stem_edge.load(demo_bundle()) as model: model.generate_text('The', max_new_tokens=2)"
    )
    loaded = loaded_after(code)
    assert {"numpy", "onnxruntime"} <= loaded
    assert not loaded & {"torch", "onnx", "zarr", "transformers"}
