"""Catalogue K5, K6, K8, K9: several processes, forks, signals and files that change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from contract import fingerprint, refused
from loading import load_fixed
from threads import run_script, tokens

import stem_edge
from stem_edge.errors import ExportError
from stem_edge.graph.formats import EngineName

# By _exit, as multiprocessing does, because onnxruntime crashes a fork that leaves by exit().
FORK = """
import gc, os, sys, threading, time, warnings
import stem_edge
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the fault
model = stem_edge.load(sys.argv[1], slots=16, threads=2)
stream = model.generate([5, 6, 7], max_new_tokens=12)
next(stream)
def work():
    for _ in range(5):
        list(model.generate([1, 2, 3], max_new_tokens=30))
thread = threading.Thread(target=work)
thread.start()
children = []
for how in ("close", "drop", "nothing"):
    time.sleep(0.02)  # the other thread may hold the engine's lock at any of these moments
    child = os.fork()
    if child:
        children.append(child)
        continue
    said = []
    for way in (lambda: next(stream), lambda: model.generate([1]), lambda: model.logits([1])):
        try:
            way()
        except stem_edge.errors.InputError as error:
            said.append(str(error))
    if how == "close":
        model.close()
    if how == "drop":
        del model, stream, way
        gc.collect()
    os.write(1, f"{len(said)} {said[0]}\\n".encode())
    os._exit(0)
print([os.waitpid(child, 0)[1] for child in children], flush=True)
thread.join()
model.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_k5_a_forked_process_is_told_to_load_for_itself(engine: EngineName, tiny: Path) -> None:
    """The fork does not hang when it closes the model, nor disturb its parent."""
    done = run_script(FORK, tiny)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    said = [line for line in lines if line.startswith("3 this model was loaded in process ")]
    assert len(said) == 3
    assert all(line.endswith("a fork of it; load it again in this one") for line in said)
    assert lines[-1] == "[0, 0, 0]"


def export_in_a_child(checkpoint: Path, out: Path) -> subprocess.Popen[str]:
    """Run an exporter that stops as soon as it holds its lock."""
    script = (
        "import sys, time, stem_edge\n"
        "from stem_edge.export import exporter\n"
        "exporter.plan_tables = lambda *_: (print('locked', flush=True), time.sleep(600))\n"
        "stem_edge.export_bundle(sys.argv[1], sys.argv[2], force=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(checkpoint), str(out)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    return child


@pytest.mark.slow
def test_k6_a_second_exporter_is_refused_and_a_killed_one_leaves_no_lock(
    tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """A reader of the bundle is not disturbed."""
    out = tmp_path / "out"
    shutil.copytree(tiny_bundle, out)
    before = fingerprint(out)
    with load_fixed(out, threads=1) as model:
        expected = tokens(model, [5, 6, 7])
        child = export_in_a_child(tiny_checkpoint, out)
        try:
            refused(
                lambda: stem_edge.export_bundle(tiny_checkpoint, out, force=True),
                ExportError,
                out,
                "another export to it is running; wait for it",
                kept=[out],
            )
        finally:
            child.kill()
            child.communicate()
        assert tokens(model, [5, 6, 7]) == expected
        assert fingerprint(out) == before
        stem_edge.export_bundle(tiny_checkpoint, out, type="fp32", rows="int8", force=True)
        assert tokens(model, [5, 6, 7]) == expected
    with load_fixed(out, threads=1) as model:
        assert tokens(model, [5, 6, 7]) == expected


# Needed because a shell makes background jobs and their children ignore Ctrl-C.
WAITING = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from stem_edge.files import disk
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
what = sys.argv[1]
with load_with(sys.argv[2], LoadOptions(slots=16, threads=1,
                    overlap=what == "prefetch")) as model:
    list(model.generate([1, 2], max_new_tokens=4))
    pread, waited = disk.pread, []
    def wait(*asked):
        if not waited and what != "turn":
            waited.append(print("waiting", flush=True))
        # A thread that reads ahead cannot be interrupted, but comes back.
        time.sleep(1 if what == "prefetch" and threading.current_thread() is not threading.main_thread() else 600)
        return pread(*asked)
    disk.pread = wait
    if what == "turn":
        threading.Thread(target=model.logits, args=([50],), daemon=True).start()
        time.sleep(0.2)
        print("waiting", flush=True)
    try:
        list(model.generate(list(range(100, 110)), max_new_tokens=4))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if what == "turn":
            import os; os._exit(0)  # the step of the other thread, which never ends, bars closing
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process on Windows")
@pytest.mark.parametrize("wait", ["read", "prefetch", "turn"])
def test_k8_ctrl_c_ends_a_wait_for_flash_and_for_another_thread(
    wait: str, tiny_bundle: Path
) -> None:
    """Takes under two seconds on an idle machine. Prompts: tests/stem_edge/commands/test_main.py."""
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING, wait, str(tiny_bundle)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert (child.returncode, out.splitlines()[-1]) == (0, "interrupted")


def test_k9_a_bundle_that_is_swapped_while_it_is_loaded(tiny_bundle: Path, tmp_path: Path) -> None:
    """The loaded model goes on with the old files; a new load takes the new ones."""
    import make_checkpoint

    other = make_checkpoint.write_checkpoint(
        tmp_path / "other", make_checkpoint.Shape(d_ff=128, stem_layers=(2,))
    )
    out = tmp_path / "out"
    shutil.copytree(tiny_bundle, out)
    with load_fixed(out, slots=8, threads=1) as old:
        every = list(range(100))
        with load_fixed(tiny_bundle, threads=1) as untouched:
            expected = untouched.logits(every)
        stream = old.generate([5, 6, 7], max_new_tokens=20)
        begun = next(stream).token_ids
        stem_edge.export_bundle(other, out, type="fp32", force=True)
        assert np.array_equal(old.logits(every), expected)  # so that most rows are read only now
        begun += [token for chunk in stream for token in chunk.token_ids]
        assert begun == tokens(old, [5, 6, 7], 20)
        with load_fixed(out, threads=1) as new:
            assert new.config.stem_layers == (2,)
            assert not np.array_equal(new.logits(every), expected)
