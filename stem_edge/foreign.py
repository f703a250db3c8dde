"""Options and commands of other programs, and what to use here instead, for error messages."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

# A line of this file is a hint, then names in llama.cpp, Ollama, mlx-lm, vLLM or transformers; * stands for any text. A
# line with # says which command, or which function of Python, takes the options that the next hints begin with.
TABLE = Path(__file__).with_name("foreign.txt")


def replacement(name: str, known: Collection[str], *, python: bool = False) -> str:
    """Return what to use instead of an unknown option or command; "" if the table does not say.

    known: options that the command or the function has; a hint that begins with one of them comes first.
    """
    elsewhere = takers = ""
    for line in TABLE.read_text("utf-8").splitlines():
        if line.startswith("#"):
            takers = line.strip("# ").partition(" | ")[2 if python else 0]
            continue
        hint, _, names = line.rpartition(": ")
        option = re.split("[ =;,]", hint)[0] if hint.startswith("--") else ""
        if any(fnmatchcase(name.replace("_", "-"), one) for one in (*names.split(), option)):
            if not option or option in known:
                return f"use {hint}" if option else hint
            elsewhere = elsewhere or (takers and f"{takers} {hint}")
    return elsewhere


def python_replacement(name: str, known: Collection[str]) -> str:
    """Return what to write instead of an unknown keyword, with "; " at the end, or ""."""
    flags = ["--" + one.replace("_", "-") for one in known]
    hint = replacement(f"--{name}", flags, python=True)
    hint = re.sub(r"--([a-z-]+)([ =][A-Z]+)?", lambda flag: flag[1].replace("-", "_"), hint)
    return hint and f"{hint}; "
