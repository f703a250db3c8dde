"""Declarations of ggml's functions, compared with the installed library and its headers."""

from __future__ import annotations

import ctypes
import re
import tomllib
from pathlib import Path

import pytest
from compiled_ggml import LIBRARY, compiled, needs_compiler, needs_library, version_source
from installed import ROOT

from stem_edge.errors import BackendError
from stem_edge.ggml import installed as module
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.installed import REINSTALL, installed_library
from stem_edge.ggml.library import (
    KNOWN_VERSIONS,
    PROTOTYPES,
    ROPE_HALVES,
    ROPE_PAIRS,
    Ggml,
    InitParams,
)

INCLUDE = LIBRARY.parents[2] / "include" if LIBRARY else Path("none")
HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h")
needs_headers = pytest.mark.skipif(
    not all((INCLUDE / name).is_file() for name in HEADERS), reason="no headers of ggml"
)


@pytest.fixture(scope="module")
def headers() -> str:
    """Read all declarations, without comments, each on one line."""
    text = "".join((INCLUDE / name).read_text("utf-8") for name in HEADERS)
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


@needs_library
def test_every_function_is_there() -> None:
    ggml = Ggml(installed_library())
    assert ggml.version in KNOWN_VERSIONS
    for name in PROTOTYPES:
        assert callable(getattr(ggml, name)), name
    with pytest.raises(AttributeError, match="ggml_nothing is not in PROTOTYPES"):
        ggml.nothing  # noqa: B018


@needs_library
def test_sizes_of_types() -> None:
    ggml = Ggml(installed_library())
    context = ggml.init(InitParams(1 << 16, None, True))
    types = [t for t in vars(ggml_types).values() if isinstance(t, ggml_types.TensorType)]
    assert len(types) == len(ggml_types.WEIGHT_TYPES) + 2
    for kind in (*types, *ggml_types.IMPORTED_TYPES):
        tensor = ggml.new_tensor_2d(context, kind.number, 512, 3)
        assert ggml.nbytes(tensor) == 3 * kind.row_nbytes(512), kind.name
    ggml.free(context)


def kind_of(declared: str) -> object:
    """The ctypes kind of a parameter or result: `const struct ggml_tensor * a`, `size_t`."""
    if "*" in declared or re.search(r"ggml_(backend\w*|gallocr|log_callback)(_t)?\b", declared):
        return ctypes.c_char_p if declared.startswith("const char *") else ctypes.c_void_p
    plain = {
        "void": None,
        "size_t": ctypes.c_size_t,
        "int64_t": ctypes.c_int64,
        "float": ctypes.c_float,
        "bool": ctypes.c_bool,
        "int": ctypes.c_int,
        "enum": ctypes.c_int,
    }
    word = declared.split()[0]
    return InitParams if declared.startswith("struct ggml_init_params") else plain[word]


@needs_headers
@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_prototype_is_what_the_header_declares(headers: str, name: str) -> None:
    found = re.search(rf"GGML(?:_BACKEND)?_API ([^;()]*?)\bggml_{name} ?\(([^()]*)\)", headers)
    assert found, "not declared"
    result, parameters = found[1].strip(), found[2].strip()
    declared = [] if parameters == "void" else [p.strip() for p in parameters.split(",")]
    expected = (kind_of(result), [kind_of(parameter) for parameter in declared])
    assert PROTOTYPES[name] == expected


@needs_headers
def test_numbers_and_structs_are_those_of_the_headers(headers: str) -> None:
    for kind in (*ggml_types.WEIGHT_TYPES.values(), ggml_types.I32, ggml_types.I64):
        assert re.search(rf"\bGGML_TYPE_{kind.name} = {kind.number}\b", headers), kind.name
    assert "GGML_STATUS_SUCCESS = 0" in headers
    assert f"GGML_ROPE_TYPE_NORMAL {ROPE_PAIRS} " in headers
    assert f"GGML_ROPE_TYPE_NEOX {ROPE_HALVES} " in headers
    fields = "size_t mem_size; void * mem_buffer; bool no_alloc; }"
    assert f"struct ggml_init_params {{ {fields}" in headers
    assert [field[0] for field in InitParams._fields_] == re.findall(r"(\w+);", fields)


KNOWN = version_source(next(iter(KNOWN_VERSIONS)))


# C source of a library, None for a file of text, and what the error says.
@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(source, message, marks=needs_compiler if source else ())
        for source, message in (
            (version_source("0.1.2"), r"ggml 0\.1\.2 is not supported .*0\.25\.3 \(llama-cpp"),
            (KNOWN, r"has no function ggml_init,.*--no-cache-dir"),
            ("int nothing;", "has no function ggml_version"),
            (None, r"libggml\.so: cannot be loaded \(.*install it again"),
        )
    ],
)
def test_other_libraries_are_refused(source: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "libggml.so").write_text("text")
    with pytest.raises(BackendError, match=message):
        Ggml(compiled(tmp_path, source) if source else tmp_path / "libggml.so")


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"not installed.* pip install 'stem-edge\[gguf\]'"):
        Ggml(installed_library())


def test_the_extra_installs_the_version_that_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (pinned,) = (
        p for p in project["optional-dependencies"]["gguf"] if p.startswith("llama-cpp-python")
    )
    assert pinned.replace("==", " ") in KNOWN_VERSIONS.values()
    assert REINSTALL.endswith(pinned)
