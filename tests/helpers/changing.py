"""Bundles changed in place: their files, with or without the manifest that lists them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stem_edge.bundle.manifest import MANIFEST


def replaced(data: bytes, changes: Mapping[str, object]) -> bytes:
    """JSON with other values at some places, which are names and numbers with spaces between."""
    document: Any = json.loads(data)
    for where, value in changes.items():
        *parents, last = where.split(" ")
        target = document
        for name in parents:
            target = target[int(name) if isinstance(target, list) else name]
        target[int(last) if isinstance(target, list) else last] = value
    return json.dumps(document).encode()


def rewrite(bundle: Path, changes: Mapping[str, object]) -> None:
    """Change values of a bundle's manifest."""
    (bundle / MANIFEST).write_bytes(replaced((bundle / MANIFEST).read_bytes(), changes))


def seal(bundle: Path, files: Mapping[str, bytes]) -> Path:
    """Write files of a bundle, and their sizes and checksums into its manifest."""
    document = json.loads((bundle / MANIFEST).read_bytes())
    for name, data in files.items():
        (bundle / name).write_bytes(data)
        entry = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        document["files"][name] = entry
    (bundle / MANIFEST).write_text(json.dumps(document), "utf-8")
    return bundle
