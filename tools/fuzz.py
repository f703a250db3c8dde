"""Throw mutants of valid files at whatever reads files that somebody else may have made.

    python tools/fuzz.py --list
    python tools/fuzz.py manifest                      # 200,000 inputs
    python tools/fuzz.py torch --seconds 60 --seed 7
    python tools/fuzz.py manifest --guided --seconds 600
    python tools/fuzz.py edit --replay build/fuzz/edit/finding-0123456789ab

Each input must be read, or be refused with a StemEdgeError of one printable line that names the file,
within 10 seconds and 1 GiB. One that ends in another way is made as small as hypothesis can, written
to --findings, and ends the run with exit status 1. hypothesis draws the mutants (tools/fuzzing); with
--guided, atheris chooses among them by the lines that they reach (Linux, pip install '.[fuzz]').
Seeds lie in tests/data/fuzz/TARGET, also findings that were repaired. Linux and macOS.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fuzzing.running import INPUT, TALLY, Order, work, write_finding
from fuzzing.targets import TARGETS

HANG_SECONDS = 60.0  # with the same input: native code that no signal stops
POLL_SECONDS = 0.5
START: Final = "spawn"  # a process that knows nothing of this one
FAULT, FAULT_OF_ATHERIS = 1, 77  # exit statuses of a process that wrote a finding itself


def run(order: Order) -> int:
    """Run an order in a process of its own; the exit status."""
    process = multiprocessing.get_context(START).Process(target=work, args=(order,))
    process.start()
    changed, since = b"", time.monotonic()
    while process.is_alive():
        process.join(POLL_SECONDS)
        if (now := _read(order.folder / INPUT)) != changed:
            changed, since = now, time.monotonic()
        elif changed and time.monotonic() - since > HANG_SECONDS:
            process.kill()
            process.join()
    status = process.exitcode
    if status not in (0, FAULT, FAULT_OF_ATHERIS):
        what = f"ended the process with {status}"
        print(f"{write_finding(order.findings, what, _read(order.folder / INPUT))}: {what}")
    return 1 if status else 0


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def show(order: Order, as_json: bool) -> None:
    """Print what was done."""
    found = json.loads(_read(order.folder / TALLY) or "{}")
    if as_json:
        print(json.dumps({"target": order.target} | found))
    elif found:
        print(
            f"{order.target}: {found['executions']:,} inputs in {found['seconds']:,.0f} s, "
            f"{found['accepted']:,} accepted, refused at {found['ends']} places, "
            f"slowest {found['slowest']:.3f} s"
        )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", nargs="?", choices=TARGETS, metavar="TARGET", help="what to fuzz")
    add("--list", action="store_true", help="name the targets")
    add("--runs", type=int, default=200_000, help="inputs (200,000)")
    add("--seconds", type=float, default=float("inf"), help="stop after so long (no end)")
    add("--seed", type=int, default=0, help="of the random numbers (0)")
    add("--guided", action="store_true", help="by coverage, with atheris")
    add("--json", action="store_true", help="print the results as JSON")
    add("--replay", type=Path, metavar="FILE", help="run one input")
    add("--findings", type=Path, default=Path("build/fuzz"), metavar="DIR", help="(build/fuzz)")
    add("--write-seeds", action="store_true", help="make the seeds anew, after a format changed")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Parse and run."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.replay and not (args.target and args.replay.is_file()):
        parser.error("--replay needs a TARGET and a FILE that exists")
    if args.runs < 1 or args.seconds <= 0:
        parser.error("--runs and --seconds must be above 0")
    if args.guided and importlib.util.find_spec("atheris") is None:
        parser.error("--guided needs atheris, which is not installed: pip install '.[fuzz]'")
    if args.write_seeds:
        from fuzzing.seeds import write_seeds  # needs torch

        write_seeds()
        return 0
    if args.list or args.target is None:
        print("\n".join(f"{name:<12} {target.about}" for name, target in TARGETS.items()))
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        order = Order(
            args.target, Path(name), args.findings / args.target, args.runs, args.seconds,
            args.seed, args.guided, args.replay.read_bytes() if args.replay else None,
        )  # fmt: skip
        status = run(order)
        if args.replay is None:
            show(order, args.json)
        return status


if __name__ == "__main__":
    sys.exit(main())
