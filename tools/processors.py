"""Run processor-dependent tests on processors that this machine does not have.

    python tools/processors.py                           on all of them
    python tools/processors.py arm64 arm64-old
    python tools/processors.py arm64 -- -m stem_edge demo      another Python command

    avx2        x86-64 without AVX-512 and VNNI: Intel's before 2019, AMD's up to Zen 3
    arm64       with dot products (Cortex-A76): phones since 2019, Raspberry Pi 5
    arm64-old   without (Cortex-A53): Raspberry Pi 3

avx2 runs at full speed with the packages of the current Python, if this processor has no newer features or
can hide them (Intel, Linux; tools/hide_vnni.c). qemu emulates the arm64 ones, some twenty times slower, on
Linux and as root. Their first run downloads wheels and Debian packages, which are unpacked but not
configured, into build/processors: half a minute and 400 MB, safe to delete. There, the command sees only a
copy of the project, and no torch, which is larger than all other packages together.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "processors"
SUITE, PYTHON = "trixie", "3.13"
TOOLS = {"mmdebstrap": "mmdebstrap", "unshare": "util-linux", "cc": "gcc"}
PACKAGES = "base-files,python3,libstdc++6,ca-certificates"
MACHINE = "aarch64"  # of the emulated processors, as wheels and qemu's programs call it
GLIBC = ["_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014"]
# Tests of code that computes or moves bytes, except those that need torch: logits of the trainers'
# checkpoints, kernels, rows, caches, edits, cached prompts.
FILES = [
    *(f"blackbox/test_{name}.py" for name in ("conformance", "kept_prompts", "stored")),
    "tools/test_demo_logits.py",
    "stem_edge/numerics",
    "stem_edge/graph/test_steps.py",
    "stem_edge/tables/test_rows.py",
    "stem_edge/tables/test_shards.py",
    *(f"runtime/rows/test_{name}.py" for name in ("store", "cache", "edits")),
    "runtime/lookups/test_overlay.py",
    "runtime/test_sampling.py",
    "runtime/backends/onnxruntime/providers/test_session.py",
]
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
TESTS += [f"tests/{name}" for name in FILES]
LAUNCHER = """
#include <unistd.h>
int main(int count, char **given) {
  char *all[count + 6];
  char *start[] = {"/emulator", "-cpu", "%s", "-0", given[0], "/usr/bin/real-python"};
  for (int n = 0; n < 6; n++) all[n] = start[n];
  for (int n = 1; n <= count; n++) all[n + 5] = given[n];
  return execv(all[0], all), 127;
}
"""
NEWER = {"avx512f", "avx_vnni"}  # words in /proc/cpuinfo of processors beyond AVX2
CANNOT_HIDE = 125  # exit status of hide_vnni.c where CPUID cannot be made to fault


EMULATED = {"arm64": "cortex-a76", "arm64-old": "cortex-a53"}  # by qemu's names
PROCESSORS = ["avx2", *EMULATED]


class UnavailableError(Exception):
    """A processor cannot be provided on this machine."""


def run(name: str, arguments: Sequence[str]) -> int:
    """Run Python on a processor; return its exit status. Raises UnavailableError."""
    if name in EMULATED:
        return run_emulated(EMULATED[name], arguments)
    words = cpu_words()
    if "avx2" in words and not words & NEWER:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
    if "cpuid_fault" in words and shutil.which("cc"):
        return run_hidden(arguments)
    raise UnavailableError("avx2 needs a processor that is one, or Intel's, Linux and a C compiler")


def cpu_words() -> set[str]:
    """Return the words of /proc/cpuinfo; an empty set if this is not x86-64 Linux."""
    path = Path("/proc/cpuinfo")
    known = platform.machine() == "x86_64" and path.exists()
    return set(path.read_text().split()) if known else set()


def run_hidden(arguments: Sequence[str]) -> int:
    """Run Python here, with features newer than AVX2 hidden. Raises UnavailableError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / "hide_vnni.so"
    source = Path(__file__).with_name("hide_vnni.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    # A separate cache, because the user's holds results for this processor with all features.
    hidden = {"LD_PRELOAD": str(library), "XDG_CACHE_HOME": str(BUILD / "cache")}
    command = [sys.executable, *arguments]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **hidden}, check=False).returncode
    if status == CANNOT_HIDE:
        raise UnavailableError("this system does not let a process hide its processor's features")
    return status


def run_emulated(model: str, arguments: Sequence[str]) -> int:
    """Run Python in qemu; first install it in a root folder. Raises UnavailableError."""
    root, emulator = BUILD / "arm64", find_tools()
    ready, wheels = root / "ready", "\n".join(requirements())
    if not ready.exists() or ready.read_text() != wheels:
        make_root(root)
        ready.write_text(wheels)
    shutil.copy(emulator, root / "emulator")
    # A native program, which the emulated Python takes for its executable, to start other processes.
    compiler = ["cc", "-static", "-x", "c", "-o", str(root / "usr/bin/python3"), "-"]
    subprocess.run(compiler, input=LAUNCHER % model, text=True, check=True)
    shutil.rmtree(root / "src", ignore_errors=True)
    for name in known_files():
        target = root / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    # Without /sys, because it describes this machine's processors and onnxruntime crashes on that.
    inside = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]
    inside += [f"--root={root}", "--wd=/src", "/usr/bin/python3"]
    variables = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": "/usr/bin", "PYTHONPATH": "/src:/site"}
    variables |= {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([*inside, *arguments], env=variables, check=False).returncode


def known_files() -> list[str]:
    """Return names of the project's files: tracked files, and new ones that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name and os.path.lexists(ROOT / name)]


def find_tools() -> Path:
    """Return the path of qemu. Raises UnavailableError if a program is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UnavailableError("emulating needs Linux and root; run it in a container, as root")
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    emulator = shutil.which(f"qemu-{MACHINE}-static")
    missing += [] if emulator else ["qemu-user-static"]
    if missing or emulator is None:
        raise UnavailableError(f"emulating needs: apt-get install {' '.join(missing)}")
    return Path(emulator)


def make_root(root: Path) -> None:
    """Unpack Debian's Python and the wheels for ARM64. Raises CalledProcessError."""
    shutil.rmtree(root, ignore_errors=True)
    debian = ["mmdebstrap", "--quiet", "--variant=extract", "--arch=arm64"]
    subprocess.run([*debian, f"--include={PACKAGES}", SUITE, str(root)], check=True)
    (root / "usr/bin" / f"python{PYTHON}").rename(root / "usr/bin/real-python")
    (root / "usr/bin/python3").unlink()
    tags = [f"--platform=manylinux{glibc}_{MACHINE}" for glibc in GLIBC]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-compile", f"--target={root / 'site'}", "--only-binary=:all:"]
    subprocess.run([*pip, f"--python-version={PYTHON}", *tags, *requirements()], check=True)


def requirements() -> list[str]:
    """Return the packages that the tests need, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = [name for name in extras["dev"] if name.startswith(("pytest", "hypothesis", "onnx"))]
    return [*own, *project["dependencies"], "zarr"]


def main() -> int:
    """Run the command line; exit status 1 if a command failed, 2 if a processor is unavailable."""
    chosen, command = parse(sys.argv[1:])
    return max([run_and_report(name, command) for name in chosen])


def parse(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the processors, and the arguments of Python to run on each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [PROCESSOR ...] [-- ARGUMENT OF PYTHON ...]",
    )
    add = parser.add_argument
    add("processors", nargs="*", choices=PROCESSORS, metavar="PROCESSOR", help="(all)")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    chosen = parser.parse_args(arguments[:at]).processors or PROCESSORS
    return chosen, arguments[at + 1 :] or TESTS


def run_and_report(name: str, command: list[str]) -> int:
    """Run a command on a processor, and print how it ended. Returns 0, 1 or 2."""
    try:
        status = run(name, command)
    except (UnavailableError, OSError, subprocess.CalledProcessError) as error:
        print(f"{name}: not run: {error}", flush=True)
        return 2
    outcome = "passed" if status == 0 else f"failed, exit status {status}"
    print(f"{name}: {' '.join(command[:3])} ... {outcome}", flush=True)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
