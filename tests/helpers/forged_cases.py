"""Runs forged bundles in a process of their own: many in one, and a new one after a crash."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from helper_process import HelperProcess

from stem_edge.graph.formats import EngineName

CASE_SECONDS = 60.0  # by the clock, on a machine that others keep busy
CPU_SECONDS = 5.0  # of this process: a refusal comes within ten seconds, also on a slower one
# What Python, numpy and onnxruntime may take in passing beside what the plan says.
SPARE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """How to load a bundle."""

    path: str
    engine: EngineName
    slots: int | None = 16
    prefill: bool | None = None
    trial: bool = False
    texts: bool = False  # use the tokenizer and the chat template, too


class Forged(HelperProcess):
    """Cases in a worker, with a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__("forged_worker.py", folder / "stderr", folder / "cache")
        self._folder = folder
        self.found = Counter[str]()  # what came of the cases
        (folder / "cache").mkdir()

    def check(self, case: Case) -> str:
        """Run a case; fails unless it is refused or runs. Returns with what it was refused."""
        told = self.ask(asdict(case), CASE_SECONDS)
        assert not told["broken"], f"{case}: {told['broken']}"
        assert told["seconds"] < CPU_SECONDS, f"{case}: took {told['seconds']:.1f} s"
        assert told["taken"] < SPARE_NBYTES, f"{case}: {told['taken']:,} bytes beyond the plan"
        refused: str = told["refused"]
        self.found[refused.partition(":")[0] or "ran"] += 1
        assert len(refused.splitlines()) <= 1, refused
        return refused

    def bundle(self) -> Path:
        """Where the next bundle is to be made; the last one goes."""
        shutil.rmtree(self._folder / "bundle", ignore_errors=True)
        return self._folder / "bundle"
