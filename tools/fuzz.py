"""Test every reader of untrusted files with mutants of valid files.

    python tools/fuzz.py                               # lists the targets
    python tools/fuzz.py manifest                      # 200,000 inputs
    python tools/fuzz.py gguf --seconds 60 --seed 7

Within 10 seconds and 1 GiB, each input must be read or be refused with a StemEdgeError: one printable
line that names the file. Any other outcome ends the run with exit status 1, and a minimized input is
written to build/fuzz. The file `running` in that folder is the current input, for the case that it kills
the process or hangs for a minute.

Seeds are in tests/data/fuzz/TARGET, together with findings that have been fixed. Linux and macOS.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from fuzzing.mutants import mutants
from fuzzing.running import SEEDS, FaultError, Runner, limit_this_process
from fuzzing.targets import TARGETS, Target

HANG_SECONDS = 60.0  # native code cannot be interrupted by a signal, so the process is ended
FINDINGS, RUNNING = Path("build/fuzz"), "running"  # folder, and file in it with the current input


def fuzz(args: argparse.Namespace, target: Target, folder: Path) -> None:
    """Run mutated inputs until --runs or --seconds is reached. folder: for the input file."""
    findings = FINDINGS / args.target
    findings.mkdir(parents=True, exist_ok=True)
    limit_this_process()
    runner, started = Runner(target, folder, findings), time.monotonic()

    seeds = [path.read_bytes() for path in sorted((SEEDS / args.target).iterdir())]
    try:
        for data in mutants(target.change, Random(args.seed), seeds):
            if runner.executions >= args.runs or time.monotonic() > started + args.seconds:
                break
            (findings / RUNNING).write_bytes(data)
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            runner.run(data)
        (findings / RUNNING).unlink(missing_ok=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(
            f"{args.target}: {runner.executions:,} inputs in {time.monotonic() - started:,.0f} s, "
            f"{runner.accepted:,} accepted, refused at {len(runner.refused_at)} places, "
            f"slowest {runner.slowest:.3f} s"
        )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", nargs="?", choices=TARGETS, metavar="TARGET", help="what to fuzz")
    add("--runs", type=int, default=200_000, help="number of inputs (200,000)")
    add("--seconds", type=float, default=float("inf"), help="stop after so long (no limit)")
    add("--seed", type=int, default=0, help="seed of the mutations (0)")
    return parser.parse_args()


def main() -> None:
    args = parse_options()
    if args.target is None:
        print("\n".join(f"{name:<12} {target.about}" for name, target in TARGETS.items()))
    else:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            fuzz(args, TARGETS[args.target], Path(folder))


if __name__ == "__main__":
    try:
        main()
    except FaultError as fault:
        sys.exit(str(fault))
