"""The tests of llama.cpp's server, out of the source package of llama-cpp-python."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

from installed import ROOT
from llama_left_out import FILES
from llama_shim import BUNDLE

PACKAGE = "llama-cpp-python==0.3.36"
OUTPUT = "output.txt"  # of their pytest, in their folder
INSIDE = "vendor/llama.cpp/"
WANTED = (f"{INSIDE}tools/server/tests/", f"{INSIDE}models/templates/")
# They import wget, which is to download models.
NO_WGET = "def download(url, out=None):\n    raise OSError(f'{url} is not downloaded here')\n"


def unpack_tests(folder: Path) -> Path | None:
    """Download the package and unpack the tests; None if it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", PACKAGE, "--dest", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        return None
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        top = archive.getnames()[0].partition("/")[0]
        wanted = tuple(f"{top}/{name}" for name in WANTED)
        members = [member for member in archive if member.name.startswith(wanted)]
        archive.extractall(folder, members, filter="data")
    tests = folder / top / WANTED[0]
    (tests / "wget.py").write_text(NO_WGET)
    return tests


def run_tests(tests: Path, bundle: Path, port: int) -> dict[str, str]:
    """Run all but what is left out; return what was found of each: passed, failure, error, skipped."""
    program = tests / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llama_shim "$@"\n')
    program.chmod(0o755)
    paths = (ROOT, ROOT / "tests" / "helpers")
    environment = os.environ | {
        BUNDLE: str(bundle),
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PORT": str(port),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--junit-xml=found.xml"]
    for plugin in ("no:xdist", "no:cacheprovider", "llama_left_out"):
        command += ["-p", plugin]
    command += [f"unit/{name}.py" for name in FILES]
    with (tests / OUTPUT).open("w") as output:
        subprocess.run(
            command, cwd=tests, env=environment, stdout=output, stderr=output, check=False
        )
    return _found(tests / "found.xml")


def _found(path: Path) -> dict[str, str]:
    found = dict[str, str]()
    for case in ET.parse(path).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = kinds[0] if kinds else "passed"
    return found
