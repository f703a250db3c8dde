"""Change JSON files and bundles in place, with or without correcting the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from stem_edge.bundle.manifest import MANIFEST


def replaced(data: bytes, changes: Mapping[str, object]) -> bytes:
    """Set values of a JSON text, or with `...` delete them.

    Places are names and indexes, separated by spaces: "files 0 nbytes".
    """
    document: Any = json.loads(data)
    for where, value in changes.items():
        *parents, last = where.split(" ")
        target = document
        for name in parents:
            target = target[int(name) if isinstance(target, list) else name]
        if value is ...:
            del target[last]
        else:
            target[int(last) if isinstance(target, list) else last] = value
    return json.dumps(document).encode()


def edit(path: Path, where: str, value: object) -> None:
    """Set or delete one value of a JSON file; see `replaced`."""
    path.write_bytes(replaced(path.read_bytes(), {where: value}))


def rewrite(bundle: Path, changes: Mapping[str, object]) -> None:
    """Change values of a bundle's manifest."""
    (bundle / MANIFEST).write_bytes(replaced((bundle / MANIFEST).read_bytes(), changes))


def seal(bundle: Path, files: Mapping[str, bytes]) -> Path:
    """Write files of a bundle, and enter their sizes and checksums in its manifest."""
    document = json.loads((bundle / MANIFEST).read_bytes())
    for name, data in files.items():
        (bundle / name).write_bytes(data)
        document["files"][name] = {"nbytes": len(data), "sha256": sha256(data).hexdigest()}
    (bundle / MANIFEST).write_text(json.dumps(document), "utf-8")
    return bundle
