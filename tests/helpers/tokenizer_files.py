"""tokenizer.json files written part by part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS: dict[str, Any] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}


def write(path: Path, model: object = WORDS, **parts: object) -> Path:
    path.write_text(json.dumps({"version": "1.0", "model": model, **parts}))
    return path


def added(number: int, content: str, **flags: bool) -> dict[str, Any]:
    return {"id": number, "content": content, **flags}
