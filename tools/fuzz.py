"""Throw mutants of valid files at whatever reads files that somebody else may have made.

    python tools/fuzz.py --list
    python tools/fuzz.py manifest                      # 2 million inputs
    python tools/fuzz.py edit --seconds 60 --jobs 2
    python tools/fuzz.py edit --replay build/fuzz/edit/finding-0123456789ab

Each input must be read, or be refused with a StemEdgeError of one printable line that names the file,
within 10 seconds and 1 GiB. What ends in another way is written to --findings; then the exit status is
1. Guided by coverage where atheris is installed (Linux, pip install atheris), else by the places where
inputs are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from fuzz_run import Findings, Runner, limit_this_process
from fuzz_targets import TARGETS
from fuzz_worker import Order, Result, count_lines, read_now

HANG_SECONDS = 60.0  # without a new input: native code that no signal stops
POLL_SECONDS = 0.5
NO_END = 1e9  # seconds


def fuzz(args: argparse.Namespace) -> Result:
    """Run workers side by side; what they did together."""
    guided = not args.plain and importlib.util.find_spec("atheris") is not None
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        orders = []
        for job in range(args.jobs):
            own = Path(folder) / str(job)
            own.mkdir()
            runs = -(-args.runs // args.jobs)
            orders.append(
                Order(args.target, runs, args.seconds or NO_END, args.seed + job, guided, str(own),
                      str(args.findings / args.target))
            )  # fmt: skip
        return _together(orders)


def _together(orders: list[Order]) -> Result:
    processes = []
    for order in orders:
        path = Path(order.folder) / "order.json"
        path.write_bytes(msgspec.json.encode(order))
        worker = Path(__file__).with_name("fuzz_worker.py")
        with (Path(order.folder) / "log").open("w") as log:
            processes.append(
                subprocess.Popen([sys.executable, worker, path], stdout=log, stderr=log)
            )
    results = []
    try:
        for order, process in zip(orders, processes, strict=True):
            death = _wait(order, process)
            results.append(_result_of(order, death, process.returncode))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return _sum(results)


def _wait(order: Order, process: subprocess.Popen[bytes]) -> str | None:
    """Wait for a worker; what its last input did if it did not end well."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        count, _ = read_now(Path(order.folder) / "now")
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:
            process.kill()
            process.wait()
            return f"nothing for {HANG_SECONDS:g} s"
    return None if process.returncode == 0 else f"ended the process with {process.returncode}"


def _result_of(order: Order, death: str | None, status: int) -> Result:
    own = Path(order.folder)
    if not (own / "result.json").exists() and death is None:
        raise SystemExit(f"{order.target}: no result\n{(own / 'log').read_text()[-2000:]}")
    result = Result()
    if (own / "result.json").exists():
        result = msgspec.json.decode((own / "result.json").read_bytes(), type=Result)
    if death is None and order.guided:
        return count_lines(order)
    if death is not None:
        count, data = read_now(own / "now")
        if count == 0 or status == 1:  # Python's own end: a mistake of this tool
            raise SystemExit(f"{order.target}: {death}\n{(own / 'log').read_text()[-2000:]}")
        folder = Path(order.findings or ".")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"finding-{hashlib.sha256(data).hexdigest()[:12]}"
        (folder / name).write_bytes(data)
        result.findings = result.findings | {death: name}
    return result


def _sum(results: list[Result]) -> Result:
    total = results[0]
    for other in results[1:]:
        total.executions += other.executions
        total.accepted += other.accepted
        total.seconds = max(total.seconds, other.seconds)
        total.slowest = max(total.slowest, other.slowest)
        total.findings = total.findings | other.findings
        total.missed = sorted(set(total.missed) & set(other.missed))
        total.lines = total.all_lines - len(total.missed)
    return total


def replay(target: str, path: Path) -> int:
    """One input; says how it ends."""
    if missing := TARGETS[target].missing():
        raise SystemExit(f"{target}: {missing}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as end:
        findings = Findings(None)
        runner = Runner(TARGETS[target].prepare(Path(folder), end), Path(folder), findings)
        limit_this_process()
        data = path.read_bytes()
        runner.run(data)
        if findings.kinds:
            return 1
        try:
            runner.read(data)
        except Exception as error:
            print(f"refused after {runner.slowest:.3f} s: {error}")
        else:
            print(f"accepted after {runner.slowest:.3f} s")
    return 0


def show(target: str, result: Result, as_json: bool) -> None:
    """Print what was done."""
    if as_json:
        print(json.dumps({"target": target} | msgspec.to_builtins(result)))
        return
    rate = result.executions / max(result.seconds, 1e-9)
    print(
        f"{target}: {result.executions:,} executions in {result.seconds:,.0f} s ({rate:,.0f}/s), "
        f"{result.accepted:,} accepted, slowest {result.slowest:.3f} s, "
        f"{result.lines} of {result.all_lines} lines, {len(result.findings)} findings"
    )
    if result.missed:
        print(f"  not reached: {' '.join(result.missed[:60])}")
    for what, name in result.findings.items():
        print(f"  {name}: {what}")


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", choices=TARGETS, metavar="TARGET", help="what to fuzz")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--runs", type=int, default=2_000_000, help="inputs (2,000,000)")
    parser.add_argument("--seconds", type=float, help="stop after so long (no end)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where inputs lie while they are read"
    )
    parser.add_argument(
        "--findings", type=Path, default=Path("build/fuzz"), metavar="DIR", help="(build/fuzz)"
    )
    args = parser.parse_args()
    if args.replay and not (args.target and args.replay.is_file()):
        parser.error("--replay needs a TARGET and a FILE that exists")
    if args.runs < 1 or args.jobs < 1 or (args.seconds is not None and args.seconds <= 0):
        parser.error("--runs, --jobs and --seconds must be above 0")
    if args.list or args.target is None:
        for name, target in TARGETS.items():
            print(f"{name:<12} {target.about}")
        return 0
    if args.replay:
        return replay(args.target, args.replay)
    if args.work is None and Path("/dev/shm").is_dir():
        args.work = Path("/dev/shm")
    result = fuzz(args)
    show(args.target, result, args.json)
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
