"""Write tokenizer.json files from their parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}


def write(path: Path, model: object = WORDS, **parts: object) -> Path:
    """Write a tokenizer.json with these parts."""
    path.write_text(json.dumps({"version": "1.0", "model": model, **parts}))
    return path


def added(number: int, content: str, **flags: bool) -> dict[str, Any]:
    """Describe an added token."""
    return {"id": number, "content": content, **flags}
