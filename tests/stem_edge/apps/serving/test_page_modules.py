"""Modules of the chat page that need no browser, in node, and the files that it is made of."""

from __future__ import annotations

import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from fake_chat_server import PAGE


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_modules_in_node() -> None:
    program = Path(__file__).with_name("page_modules.test.mjs")
    command = ["node", "--test", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_vendored_files_are_what_their_table_says() -> None:
    rows = re.findall(r"\| (\S+) \|.*\| ([0-9a-f]{64}) \|", (PAGE / "vendor/README.md").read_text())
    assert {name for name, _ in rows} == {"marked.esm.js", "purify.es.mjs"}
    for name, digest in rows:
        assert sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest


def test_the_page_names_only_files_beside_it() -> None:
    """A strict policy refuses all else: addresses of others, styles and scripts in markup."""
    html = (PAGE / "index.html").read_text()
    names = re.findall(r'(?:href|src)="([^"#]+)"', html)
    assert len(names) > 5
    assert all(name.startswith("./") and (PAGE / name).is_file() for name in names)
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", html)
    for module in PAGE.rglob("*.mjs"):
        if module.parent.name != "vendor":
            code = module.read_text()
            imports = re.findall(r'from "([^"]+)"', code)
            assert all((module.parent / name).is_file() for name in imports)
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|new Function", code
            )
