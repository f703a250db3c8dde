"""Load forged bundles in another process, which is replaced after a crash."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from helper_process import HelperProcess

from stem_edge.graph.formats import EngineName

CASE_SECONDS = 60.0  # wall time, generous because the machine may be busy
CPU_SECONDS = 15.0  # a refusal takes less than one here; machines of tests are several times slower
# Memory that Python, numpy and onnxruntime may take for a moment, beyond the plan.
SPARE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """A bundle, and how to load it."""

    path: str
    engine: EngineName
    slots: int | None = 16
    texts: bool = False  # also use the tokenizer and the chat template


class Forged(HelperProcess):
    """A worker with its own cache folder, and the outcomes of its cases."""

    def __init__(self, folder: Path) -> None:
        super().__init__("forged_worker.py", folder / "stderr", folder / "cache")
        self._folder = folder
        self.found = Counter[str]()  # "ran", or the error type
        (folder / "cache").mkdir()

    def check(self, case: Case) -> str:
        """Run a case, which must run or be refused. Returns the refusal, or an empty text."""
        told = self.ask(asdict(case), CASE_SECONDS)
        assert not told["broken"], f"{case}: {told['broken']}"
        assert told["seconds"] < CPU_SECONDS, f"{case}: took {told['seconds']:.1f} s"
        assert told["taken"] < SPARE_NBYTES, f"{case}: {told['taken']:,} bytes beyond the plan"
        refused: str = told["refused"]
        self.found[refused.partition(":")[0] or "ran"] += 1
        assert len(refused.splitlines()) <= 1, refused
        return refused

    def bundle(self) -> Path:
        """Delete the last bundle, and return where to make the next one."""
        shutil.rmtree(self._folder / "bundle", ignore_errors=True)
        return self._folder / "bundle"
