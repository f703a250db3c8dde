"""A bundle of 3 GB over connections that are cut at ten places."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hub_server import HubServer, cache_of
from manifests import make_bundle

from stem_edge.bundle.manifest import MANIFEST, FileEntry, encode_manifest, open_manifest

NAME = "acme/large"
NBYTES, FILES = 750_000_000, 4
MEMORY_NBYTES = 400 << 20  # of the process, Python and its libraries included
PROGRAM = """
import json, re, sys
import stem_edge
path = stem_edge.open_bundle(sys.argv[1]).path
# Not ru_maxrss, which begins with what the parent had.
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(json.dumps([str(path), int(peak)]))
"""


def large_bundle(folder: Path) -> Path:
    """Write a bundle with large files of zeros, which take no room, and a few other bytes."""
    make_bundle(folder)
    manifest = open_manifest(folder)
    files = dict(manifest.files)
    for number in range(FILES):
        path = folder / f"large{number}"
        with path.open("wb") as file:
            file.write(bytes([number + 1]) * 100)
            file.truncate(NBYTES)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = FileEntry(NBYTES, sha256)
    changed = msgspec.structs.replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(encode_manifest(changed))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of a process")
def test_three_gigabytes_cut_at_ten_places(hub: HubServer, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 2 * FILES * NBYTES:
        pytest.skip("the disk has no room for it")
    commit = hub.add(NAME, large_bundle(tmp_path / "bundle"))
    cuts = {"large0": [NBYTES * n // 8 for n in range(1, 8)]}
    cuts |= {f"large{n}": [NBYTES * n // 5] for n in range(1, FILES)}
    assert sum(map(len, cuts.values())) == 10
    hub.faults.cuts = cuts
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"hf:{NAME}"], check=True, stdout=subprocess.PIPE, text=True
    )
    path, peak_kib = json.loads(found.stdout)
    print(f"{hub.sent:,} bytes sent, {peak_kib << 10:,} bytes of memory at most")
    assert not any(hub.faults.cuts.values())
    assert Path(path) == cache_of(NAME) / "snapshots" / commit
    manifest = open_manifest(path)
    for name, entry in manifest.files.items():
        with Path(path, name).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    assert not list(cache_of(NAME).rglob("*.incomplete"))
    # What was in flight is sent again, 10 MB at most for each cut.
    assert manifest.nbytes <= hub.sent + (1 << 20) <= manifest.nbytes + 10 * (11 << 20)
    assert peak_kib << 10 < MEMORY_NBYTES
    shutil.rmtree(cache_of(NAME))
