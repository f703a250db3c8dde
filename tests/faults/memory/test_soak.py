"""Threads, files and memory stay flat over thousands of generations that end in every way."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soak
from threads import tokens

import stem_edge
from stem_edge.graph.formats import EngineName

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("watchdog")]
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its memory")
# In a whole suite, other tests' garbage moves too; a leak of a few hundred bytes a generation shows.
GENEROUS = 4 << 20


@only_linux
@pytest.mark.parametrize(("engine", "generations"), [("onnxruntime", 4_000), ("ggml", 2_000)])
def test_soak_of_short_generations_is_flat(
    engine: EngineName, generations: int, tiny: Path
) -> None:
    """A short run of tools/soak.py."""
    with stem_edge.load(tiny, engine=engine, slots=32, threads=1) as model:
        expected = tokens(model, [5, 6, 7])
        verdict = soak.soak(model, generations)
        assert tokens(model, [5, 6, 7]) == expected
    assert verdict.samples[-1].done >= generations
    assert verdict.flat(GENEROUS * 10_000 / generations), verdict.line()


def test_the_command_says_so(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few generations, either verdict is fine."""
    monkeypatch.setattr(soak, "SAMPLES", 8)
    assert soak.main([str(tiny_bundle), "--generations", "40"]) in (0, 1)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "); threads " in line
    soak.main([str(tiny_bundle), "--minutes", "0.02", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["samples"][-1]["done"] > 0
    assert {"memory", "threads", "files"} <= found["samples"][0].keys()


def leak_memory(kept: list[object]) -> None:
    kept.append(bytearray(b"x" * (64 << 10)))


def leak_a_file(kept: list[object]) -> None:
    kept.append(Path(__file__).open("rb"))  # noqa: SIM115


def leak_a_thread(kept: list[object]) -> None:
    end = threading.Event()
    kept.append(end)
    threading.Thread(target=end.wait, daemon=True).start()


@only_linux
@pytest.mark.parametrize("leak", [leak_memory, leak_a_file, leak_a_thread])
def test_a_leak_is_found(
    leak: Callable[[list[object]], None], tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    real = soak.generate_one

    def leaking(*given: Any) -> int:
        leak(kept)
        return real(*given)

    monkeypatch.setattr(soak, "SAMPLES", 8)
    monkeypatch.setattr(soak, "generate_one", leaking)
    with stem_edge.load(tiny_bundle, slots=32, threads=1) as model:
        verdict = soak.soak(model, 120)
    for one in kept:
        getattr(one, "close", getattr(one, "set", lambda: None))()
    assert not verdict.flat(), verdict.line()
    if leak is not leak_memory:
        assert verdict.growth.more_files + verdict.growth.more_threads > 0
