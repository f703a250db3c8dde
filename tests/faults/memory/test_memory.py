"""Catalogue R1 to R6: too little memory. Rows and slots: test_cache.py."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import checked_message, refused
from installed import DEMO
from loading import load_fixed
from threads import run_script, tokens

from stem_edge.errors import MemoryPlanError, OutOfMemoryError
from stem_edge.graph.formats import EngineName
from stem_edge.shown import parse_size
from stem_edge.system import memory as machine
from stem_edge.system.memory import available_memory, memory_groups

NOT_APPLICABLE: dict[str, str] = {
    "R7": "A native abort for want of memory ends the process that has the model; plans refuse before (R1 to R4).",
    "R9": "no file has counts: an export counts the tokens of a text in int64",
}
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and limits")


def test_r1_a_budget_below_the_least_is_refused_with_its_parts(
    engine: EngineName, tiny: Path
) -> None:
    message = refused(
        lambda: load_fixed(tiny, memory=5_000_000, engine=engine),
        MemoryPlanError,
        *(
            "memory of 5 MB is too small",
            str(tiny),
            "B are needed",
            "this process",
            "text of a prompt",
        ),
        *("weights", "KV cache", "activations", "reads", "row cache of", "allow more"),
        kept=[tiny],
    )
    # This process may have gigabytes, after thousands of other tests.
    parts = list(map(parse_size, re.findall(r" ([\d.]+ [kMG]?B)(?=[,)])", message)))
    (least,) = map(parse_size, re.findall(r"at least ([\d.]+ [MG]B) ", message))
    assert sum(parts) == pytest.approx(least, rel=0.02)
    assert len(parts) == 7


# Sample the peak every millisecond, and between any two pieces of text.
LADDER = """
import json, re, sys, threading
import numpy as np, stem_edge
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.system.memory import own_memory
from stem_edge.shown import parse_size
from stem_edge.bundle import footprint
path, engine, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
footprint.LEAST_PREPARED = int(sys.argv[4])
stem_edge.load(path, engine=engine).close()  # what the libraries take for good is theirs
samples, done = [0], threading.Event()
def watch():
    while not done.wait(0.001):
        samples[0] = max(samples[0], own_memory())
thread = threading.Thread(target=watch, daemon=True)
thread.start()
try:
    stem_edge.load(path, engine=engine, memory=1000)
except stem_edge.errors.MemoryPlanError as error:
    least = parse_size(re.search(r"at least ([\\d.]+ M?k?B)", str(error))[1])
found = []
for more in (-step, step, 2 * step, 4 * step, 8 * step, 16 * step):
    budget, samples[0] = least + more, 0
    try:
        model = load_with(path, LoadOptions(engine=engine, memory=budget))
    except stem_edge.errors.MemoryPlanError as error:
        found.append([budget, 0, 0, str(error)])
        continue
    with model:
        V, room = model.config.vocab_size, model.plan.context_length
        for start in range(0, V, room - 8):
            ids = np.arange(start, min(V, start + room - 8))
            for chunk in model.generate(ids, max_new_tokens=8, temperature=3.0, seed=1):
                samples[0] = max(samples[0], own_memory())
        found.append([budget, samples[0], model.plan.slots, ""])
done.set()
thread.join()
print(json.dumps(found))
"""


@pytest.mark.slow
@only_linux
@pytest.mark.parametrize("which", ["demo", "tiny_bundle", "tiny_bundle prepared", "tiny_gguf"])
def test_r2_a_scan_over_all_ids_keeps_every_budget_of_a_ladder(
    which: str, request: pytest.FixtureRequest
) -> None:
    """RssAnon + VmSwap, of a process that keeps loading with other budgets; one is too small."""
    path = DEMO if which == "demo" else request.getfixturevalue(which.split()[0])
    engine, least = "ggml" if which == "tiny_gguf" else "onnxruntime", "1000000000"
    if which.endswith("prepared"):
        least = "0"  # bytes of the smallest backbone that is prepared
    done = run_script(LADDER, path, engine, "2000000", least)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # So small a backbone fits unprepared where preparing, with another type of keys and values, does not.
    assert "is too small" in found[0][3] or which.endswith("prepared")
    assert sum(bool(refusal) for *_, refusal in found) <= 2  # a process may have grown since
    slots = [count for *_, count, refusal in found[2:] if not refusal]
    assert slots[0] > 0
    assert slots == sorted(slots)  # more memory, more slots
    for budget, peak, held, refusal in found:
        assert refusal or (0 < peak <= budget and held), found


class Allocations:
    """Counts allocations of arrays, and makes the one of a number fail, or all from
    there on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.failing, self.for_ever = 0, 0, False
        self._lock = threading.Lock()
        for module, name in (
            (np, "zeros"), (np, "empty"), (np, "full"), (np, "frombuffer"),
        ):  # fmt: skip
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*args: Any, **options: Any) -> Any:
            self.next()
            return real(*args, **options)

        return allocate

    def next(self) -> None:
        with self._lock:
            self.count += 1
            failing = self.count == self.failing or (self.for_ever and self.count > self.failing)
        if self.failing and failing:
            raise MemoryError("Unable to allocate 3.00 GiB for an array")

    @contextlib.contextmanager
    def fail(self, number: int, *, for_ever: bool) -> Iterator[None]:
        self.count, self.failing, self.for_ever = 0, number, for_ever
        try:
            yield
        finally:
            self.failing = 0


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    return Allocations(monkeypatch)


def each_failure(
    allocations: Allocations, call: Callable[[], object], *, for_ever: bool
) -> Iterator[None]:
    """Fail the first allocation of a call, then the second, until the call needs no more.

    Yields after each call; one that could not do without ends in an OutOfMemoryError.
    """
    for number in range(1, 500):
        with allocations.fail(number, for_ever=for_ever):
            try:
                call()
            except OutOfMemoryError as error:
                checked_message(str(error), "no memory left", "Unable to allocate", "load with")
            reached = allocations.count >= number
        if not reached:
            assert number > 2
            return
        yield
    pytest.fail("it never ended")


@pytest.mark.parametrize("for_ever", [False, True])
def test_r3_loading_ends_cleanly_at_whichever_allocation_fails(
    engine: EngineName, tiny: Path, allocations: Allocations, for_ever: bool
) -> None:
    with load_fixed(tiny, engine=engine, threads=1) as model:
        expected = tokens(model, [5, 6, 7], 4)

    def load() -> None:
        load_fixed(tiny, engine=engine, slots=16, threads=1).close()

    tries = sum(1 for _ in each_failure(allocations, load, for_ever=for_ever))
    assert tries > 4
    with load_fixed(tiny, engine=engine, threads=1) as model:
        assert tokens(model, [5, 6, 7], 4) == expected


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("more", [{"overlap": False}, {}, {"device_memory": "100MB"}], ids=str)
def test_r3_generating_goes_on_after_whichever_allocation_failed(
    engine: EngineName, tiny: Path, allocations: Allocations,
    for_ever: bool, more: dict[str, Any],
) -> None:  # fmt: skip
    """The cache stays consistent, and the next call gives the right tokens."""
    if engine == "ggml" and "device_memory" in more:
        pytest.skip("ggml has no devices")
    options: Any = {"threads": 1, "slots": 8} | more
    with load_fixed(tiny, engine=engine, **options) as model:
        expected = tokens(model, [5, 6, 7], 4)
        other = list(range(100, 112))
        many = lambda: model.generate_texts([other[:3], other], max_new_tokens=3)
        for call in (lambda: tokens(model, other, 3), many):
            for _ in each_failure(allocations, call, for_ever=for_ever):
                assert tokens(model, [5, 6, 7], 4) == expected


def test_r3_memory_that_the_system_refuses_is_a_memory_error(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    """Python raises OSError where mmap refuses."""
    real = mmap.mmap

    def refuse(descriptor: int, *args: Any, **options: Any) -> mmap.mmap:
        if descriptor == -1:
            raise OSError(12, "Cannot allocate memory")
        return real(descriptor, *args, **options)

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="8,388,608 bytes: Cannot allocate memory"):
        machine.own_pages((1 << 20,), np.int64)
    refused(
        lambda: load_fixed(tiny_gguf, engine="ggml"),
        OutOfMemoryError,
        *("no memory left", "Cannot allocate memory", "load with a lower memory"),
        kept=[tiny_gguf],
    )


LIMITED = """
import resource, sys
import threading
import onnxruntime, stem_edge
load, Refused = stem_edge.load, stem_edge.errors.StemEdgeError
load(sys.argv[1], threads=1).close()  # what a load imports and keeps has room
thread = threading.Thread()  # the first one to end loads a library, without which glibc aborts
thread.start()
thread.join()
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) << 10
limit = used + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with load(sys.argv[1], threads=1) as model:
        print(model.generate([5, 6, 7], max_new_tokens=4).__next__().token_ids)
except Refused as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@only_linux
def test_r4_a_low_limit_of_addresses_is_refused_clearly_or_enough() -> None:
    """Where nothing was loaded before, native libraries abort: an allocation fails where they catch nothing."""
    ended = []
    for more in (1 << 20, 4 << 20, 64 << 20):
        done = run_script(LIMITED, DEMO, str(more))
        assert done.returncode == 0, done.stderr[-600:]
        assert done.stdout.count("\n") == 1
        ended.append(done.stdout[0] == "[")
    assert ended == sorted(ended) and ended[-1]


@contextlib.contextmanager
def own_cgroup(nbytes: int) -> Iterator[Path]:
    """Make a cgroup of version 1 or 2 with a limit; skip the test if that is not allowed."""
    groups, version = memory_groups()
    if not groups:
        pytest.skip("no cgroup accounts memory here")
    folder = groups[0] / f"stem-edge-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        (folder / name).write_text(str(nbytes))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip("this user may not make a cgroup with a limit")
    try:
        yield folder
    finally:
        for _ in range(200):
            try:
                folder.rmdir()
                break
            except OSError:
                threading.Event().wait(0.02)


CONFINED = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
import stem_edge
from stem_edge.system.memory import available_memory
print(available_memory(), flush=True)
with stem_edge.load(sys.argv[2], threads=1) as model:
    for start in range(0, 1700, 100):
        model.logits(list(range(start, start + 100)))
    print(model.plan.total, flush=True)
if len(sys.argv) > 3:
    bytearray(int(sys.argv[3]))[::4096] = b"x" * (int(sys.argv[3]) // 4096)
    print("alive", flush=True)
"""


@only_linux
def test_r5_a_process_within_a_cgroup_keeps_to_its_limit() -> None:
    """tests/stem_edge/system/test_memory.py has limits of both versions, nested and none."""
    limit = 256 << 20
    with own_cgroup(limit) as folder:
        done = run_script(CONFINED, folder, DEMO)
    assert done.returncode == 0, done.stderr
    left, planned = map(int, done.stdout.split())
    assert left < limit < available_memory()
    assert planned < limit


@pytest.mark.slow
@only_linux
def test_r6_after_a_kill_for_memory_the_next_start_is_healthy(
    tmp_path: Path, own_cache_folder: Path
) -> None:
    with own_cgroup(256 << 20) as folder:
        done = run_script(CONFINED, folder, DEMO, str(1 << 30))
    assert done.returncode == -signal.SIGKILL
    assert "alive" not in done.stdout
    check_healthy(own_cache_folder)


def check_healthy(cache: Path) -> None:
    """Check that the leftovers of the killed process load, and that no file is partial."""
    with load_fixed(DEMO, threads=1) as model:
        assert model.generate_text("The capital of Peru is", max_new_tokens=3).startswith(" Lima")
    assert not [path for path in cache.rglob("*") if path.name.endswith((".tmp", ".partial"))]
