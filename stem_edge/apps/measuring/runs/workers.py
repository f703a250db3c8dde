"""Start worker processes, send them requests, and sample their memory meanwhile."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from stem_edge import errors
from stem_edge.apps.measuring.runs.results import Phase
from stem_edge.apps.measuring.sampler import sampled
from stem_edge.errors import StemEdgeError
from stem_edge.files.names import PREPARED, cache_folder
from stem_edge.system.child import SIGKILL, code_command
from stem_edge.system.page_cache import files_in
from stem_edge.system.process_memory import MemoryReader

# Ctrl-C reaches every process of the terminal. Workers ignore it, so that only the parent prints; the
# parent then ends its workers.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from stem_edge.apps.measuring.runs.worker import main; main()"
)
END_SECONDS = 10.0


@dataclass(frozen=True)
class Subject:
    """A bundle or GGUF file to measure, its name in the report, and its options for loading."""

    name: str
    kind: str  # key of worker.KINDS
    path: str
    options: dict[str, Any] = field(default_factory=dict)  # of stem_edge.load

    def loading(self, context: int, threads: int) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, arguments for the worker process) of each phase of loading."""
        load = {"kind": self.kind, "path": self.path, "options": self.options}
        return [("start", {}), ("load", load | {"context": context, "threads": threads})]

    @property
    def prepared(self) -> Path:
        """Folder that caches weights repacked for this processor; loads map its files into memory."""
        return cache_folder(self.options.get("cache_dir")) / PREPARED

    def files(self) -> list[Path]:
        """Return all files that a load may read: the model's, and all files of the weight cache."""
        path = Path(self.path)
        own = [path] if path.is_file() else files_in(path)
        return [*own, *files_in(self.prepared)]


class WorkerProcess:
    """A process that loads and runs a model, while this process samples its memory."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self._began = subject, time.perf_counter()
        self._process = subprocess.Popen(
            code_command(COMMAND),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            places = [Path(subject.path), subject.prepared]
            self._reader = MemoryReader(self._process.pid, places)
        except BaseException:
            self.close()
            raise

    def ask(self, phase: str, **what: Any) -> Phase:
        """Let the worker carry out a phase with arguments `what`; return its time and memory.

        The first phase is timed from the start of the process. Raises the worker's error, or
        StemEdgeError if the worker process ended.
        """
        began, self._began = self._began or time.perf_counter(), 0.0

        def send() -> tuple[str, float]:
            line = self._send(json.dumps({"do": phase, **what}))
            return line, time.perf_counter() - began

        try:
            (line, seconds), memory = sampled(self._reader, send)
        except OSError:  # the process has ended
            raise StemEdgeError(self._died(phase)) from None
        if not line.endswith("\n"):  # no answer, or only a part because it ended meanwhile
            raise StemEdgeError(self._died(phase))
        answer = json.loads(line)
        if "error" in answer:
            raise self._error(answer["type"], answer["error"], phase)
        return Phase(phase, seconds, len(what.get("ids", ())), memory, **answer)

    def _error(self, kind: str, words: str, phase: str) -> StemEdgeError:
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, StemEdgeError):
            return known(words)
        # Name the class, because the message may be empty, like that of MemoryError.
        return StemEdgeError(
            f"{self.subject.name} failed in phase {phase}: {' '.join([kind, *words.split()])}; "
            "if it needs more memory than there is, give it a shorter context"
        )

    def _send(self, line: str) -> str:
        print(line, file=self._process.stdin, flush=True)
        return cast(IO[str], self._process.stdout).readline()

    def _died(self, phase: str) -> str:
        begin = f"{self.subject.name} ended while it was measured, in phase {phase}: "
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{begin}its memory cannot be read, or it stopped answering; see what it printed"
        if status == -SIGKILL:
            return (
                f"{begin}the system killed it, most likely because it ran out of memory; "
                "allow more memory or a shorter context"
            )
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{begin}{how}; see what it printed"

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self._process.kill()
        self._process.communicate()
