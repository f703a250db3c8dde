"""Whether tests reach enough of the code; run after `coverage run -m pytest` and `coverage combine`.

    python tools/coverage_gate.py [--list]

Every line and branch of the modules on the trust boundary (tools/boundary.py), and most of the rest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from boundary import ROOT, modules

OVERALL = 90.0  # percent of all lines and branches
MOST_SHOWN = 12


def report() -> dict[str, Any]:
    """What coverage.py measured, of each file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "coverage", "json", "-q", "-o", str(out)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit("nothing was measured; run: make coverage")
        found: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return found


def gaps(files: dict[str, Any]) -> dict[str, str]:
    """Modules on the boundary that tests do not reach all of -> what is missing."""
    missing = {}
    for name in modules():
        if name not in files:
            missing[name] = "no test imports it"
            continue
        found = files[name]
        places = [str(line) for line in found["missing_lines"]]
        places += [f"{a}->{b}" for a, b in found.get("missing_branches", [])]
        if places:
            more = f" and {len(places) - MOST_SHOWN} more" if len(places) > MOST_SHOWN else ""
            missing[name] = ", ".join(places[:MOST_SHOWN]) + more
    return missing


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the modules on the boundary")
    if parser.parse_args().list:
        print("\n".join(modules()))
        return 0
    measured = report()
    files = {Path(name).as_posix(): found for name, found in measured["files"].items()}
    missing, overall = gaps(files), float(measured["totals"]["percent_covered"])
    for name, places in missing.items():
        print(f"{name}: not reached: {places}")
    print(
        f"{len(modules()) - len(missing)} of {len(modules())} modules on the boundary are covered"
    )
    print(f"overall {overall:.1f} %, expected {OVERALL:g} %")
    return 1 if missing or overall < OVERALL else 0


if __name__ == "__main__":
    sys.exit(main())
