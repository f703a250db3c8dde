"""Contents of the built packages."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest
from installed import ROOT

import stem_edge

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TOOL = PYPROJECT["tool"]["setuptools"]


def test_every_folder_with_modules_is_a_listed_package() -> None:
    mapped = {name: ROOT / folder for name, folder in TOOL["package-dir"].items()}
    assert set(TOOL["packages"]) == set(mapped)
    homes = {folder.resolve() for folder in mapped.values()}
    for folder in mapped.values():
        # An unlisted subfolder would work in a checkout, but be missing from the wheel.
        assert not [path for path in folder.rglob("*.py") if path.parent.resolve() not in homes]


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing a submodule binds its name in the package: `stem_edge.verify` is a function."""
    modules = {path.stem for path in (ROOT / "stem_edge").glob("*.py")}
    modules |= {name.split(".")[1] for name in TOOL["packages"] if name.count(".") == 1}
    assert not modules & set(stem_edge.__all__)


def test_public_names_are_there() -> None:
    for name in stem_edge.__all__:
        assert getattr(stem_edge, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stem_edge.nothing


def test_every_file_of_the_demo_model_is_package_data() -> None:
    package = ROOT / "stem_edge"
    listed = {p for pattern in TOOL["package-data"]["stem_edge"] for p in package.glob(pattern)}
    files = {p for p in (package / "demo_model").rglob("*") if p.is_file()}
    files |= {
        p for p in (package / "apps" / "measuring").rglob("*") if p.suffix in (".onnx", ".txt")
    }
    assert len(files) > 5
    assert files <= listed


def test_the_links_for_type_checkers_point_to_the_folders() -> None:
    for name in ("export", "runtime"):
        assert (ROOT / "stem_edge" / name).resolve() == (ROOT / name).resolve()


def test_a_plain_install_exports() -> None:
    """What no export can do without is imported; libraries of extras go by import_module."""
    plain = {re.split(r"[^\w-]", given)[0] for given in PYPROJECT["project"]["dependencies"]}
    found = set[str]()
    for path in (ROOT / "export").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            found |= {name.name for name in node.names} if isinstance(node, ast.Import) else set()
            found |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
    tops = {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"stem_edge"}
    assert "gguf" in tops and tops <= plain
