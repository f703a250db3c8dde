"""Throw mutants of valid files at whatever reads files that somebody else may have made.

    python tools/fuzz.py --list
    python tools/fuzz.py manifest                      # 200,000 inputs
    python tools/fuzz.py torch --seconds 60 --seed 7
    python tools/fuzz.py manifest --guided --seconds 600
    python tools/fuzz.py edit --replay build/fuzz/edit/finding-0123456789ab

Each input must be read, or be refused with a StemEdgeError of one printable line that names the file,
within 10 seconds and 1 GiB. One that ends in another way is made smaller, written to --findings, and
ends the run with exit status 1; as it was it stays there as `running`, also if it ended the process
or stopped it for a minute. With --guided, atheris chooses among the mutants by the lines that they reach (Linux,
pip install '.[fuzz]'). Seeds lie in tests/data/fuzz/TARGET, also findings that were repaired. Linux
and macOS.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from fuzzing.mutants import MAX_NBYTES, Change, mutants, mutate
from fuzzing.running import SEEDS, FaultError, Runner, limit_this_process

if TYPE_CHECKING:
    from fuzzing.targets import Target

HANG_SECONDS = 60.0  # with the same input: native code that no signal stops
RUNNING = "running"  # the input that is being read


def fuzz(args: argparse.Namespace, target: Target, folder: Path) -> None:
    """Run inputs as the command line asks; `folder` is for files that the target reads."""
    findings: Path = args.findings / args.target
    findings.mkdir(parents=True, exist_ok=True)
    limit_this_process()
    runner, started = Runner(target, folder, findings), time.monotonic()

    def one(data: bytes) -> str:
        (findings / RUNNING).write_bytes(data)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        return runner.run(data)

    seeds = [path.read_bytes() for path in sorted((SEEDS / args.target).iterdir())]
    try:
        if args.replay:
            print(one(args.replay.read_bytes()))
        elif args.guided:
            guide(args, target.change, seeds, one, folder / "corpus")
        else:
            for data in mutants(target.change, Random(args.seed), seeds):
                if runner.executions >= args.runs or time.monotonic() > started + args.seconds:
                    break
                one(data)
        (findings / RUNNING).unlink(missing_ok=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if runner.executions and not args.replay:
            show(args, runner, time.monotonic() - started)


def show(args: argparse.Namespace, runner: Runner, seconds: float) -> None:
    """Print what was done."""
    found = {name: getattr(runner, name) for name in ("executions", "accepted", "slowest")}
    if args.json:
        print(
            json.dumps(
                {"target": args.target, "seconds": seconds, "ends": len(runner.ends)} | found
            )
        )
        return
    print(
        f"{args.target}: {runner.executions:,} inputs in {seconds:,.0f} s, {runner.accepted:,} "
        f"accepted, refused at {len(runner.ends)} places, slowest {runner.slowest:.3f} s"
    )


def guide(
    args: argparse.Namespace,
    change: Change,
    seeds: list[bytes],
    one: Callable[[bytes], object],
    corpus: Path,
) -> None:
    """Let libFuzzer choose which inputs to change, by the lines that they reach."""
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

    def changed(data: bytes, most_nbytes: int, seed: int) -> bytes:
        random = Random(seed)
        return mutate(change, random, data, random.choice(seeds))[:most_nbytes]

    if child := os.fork():  # libFuzzer ends its process
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(status)
        return
    corpus.mkdir()
    options = [f"-runs={args.runs}", f"-max_total_time={int(min(args.seconds, 1e9))}"]
    options += [f"-seed={args.seed + 1}", "-timeout=0", "-handle_alrm=0", "-rss_limit_mb=0"]
    options += [f"-max_len={MAX_NBYTES}", "-len_control=0", f"-artifact_prefix={corpus}/"]
    places = [str(corpus), str(SEEDS / args.target)]  # what libFuzzer finds goes into the first
    atheris.Setup([sys.argv[0], *options, *places], one, custom_mutator=changed)
    atheris.Fuzz()


def targets(guided: bool) -> dict[str, Target]:
    """All of them, and what they read with followed by atheris or not."""
    with ExitStack() as end:
        if guided:
            import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

            end.enter_context(atheris.instrument_imports(include=["stem_edge"]))
        from fuzzing.targets import TARGETS

        return TARGETS


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="what to fuzz")
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


def main() -> None:
    """Parse and run."""
    parser = make_parser()
    args = parser.parse_args()
    if args.replay and not (args.target and args.replay.is_file()):
        parser.error("--replay needs a TARGET and a FILE that exists")
    if args.runs < 1 or args.seconds <= 0:
        parser.error("--runs and --seconds must be above 0")
    if args.guided and importlib.util.find_spec("atheris") is None:
        parser.error("--guided needs atheris, which is not installed: pip install '.[fuzz]'")
    if args.write_seeds:
        from fuzzing.seeds import write_seeds  # needs torch

        write_seeds()
        return
    known = targets(args.guided)
    if args.list or args.target is None:
        print("\n".join(f"{name:<12} {target.about}" for name, target in known.items()))
    elif args.target not in known:
        parser.error(f"no target {args.target}; expected one of {', '.join(known)}")
    else:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            fuzz(args, known[args.target], Path(folder))


if __name__ == "__main__":
    try:
        main()
    except FaultError as fault:
        sys.exit(str(fault))
