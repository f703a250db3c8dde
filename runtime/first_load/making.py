"""Makes a bundle, or fetches a checkpoint, in a separate process, which frees all its memory."""

from __future__ import annotations

from pathlib import Path

from stem_edge import errors
from stem_edge.errors import ExportError, OutOfMemoryError, StemEdgeError
from stem_edge.graph.formats import EngineName
from stem_edge.shown import printable
from stem_edge.system.child import (
    REFUSED,
    SIGKILL,
    last_line,
    module_command,
    run_worker,
    signal_name,
)

WORKER = "stem_edge.export.worker"
MAX_MESSAGE_CHARS = 2000


def make(checkpoint: str, bundle: Path, engine: EngineName, progress: bool | None) -> None:
    """Export a checkpoint in a separate process. Raises the errors of the export, and ExportError."""
    _run(checkpoint, str(bundle), engine, progress)


def fetched(name: str, progress: bool | None) -> str:
    """Fetch a checkpoint's files from a hub; return its path. Raises HubError, ExportError."""
    return _run(name, "", "", progress).removesuffix("\n")


def _run(checkpoint: str, bundle: str, engine: str, progress: bool | None) -> str:
    """Run the worker process; return its stdout. With bundle "", it only fetches the checkpoint."""
    command = module_command(WORKER, checkpoint, bundle, engine, str(progress))
    try:
        status, said = run_worker(command)
    except OSError as error:
        raise ExportError(
            f"{checkpoint}: cannot start {command[0]} to make its bundle ({error.strerror}); free some memory and try again"
        ) from error
    if status == -SIGKILL:
        raise OutOfMemoryError(
            f"{checkpoint}: the process that makes its bundle was killed, as a system does that has no "
            "memory left; free some and try again"
        )
    if status == REFUSED:
        raise refusal(said)
    if status:
        how = signal_name(status) if status < 0 else f"exit status {status}"
        raise ExportError(
            f"{checkpoint}: the process that makes its bundle ended ({how}); try again, "
            f"or see what it says: stem-edge export {checkpoint} OUT"
        )
    return said.decode()


def refusal(output: bytes) -> StemEdgeError:
    """Convert the last line that a worker printed into the StemEdgeError that it names."""
    name, _, message = printable(last_line(output)[:MAX_MESSAGE_CHARS]).partition(": ")
    kind = getattr(errors, name, ExportError)
    known = isinstance(kind, type) and issubclass(kind, StemEdgeError)
    return kind(message) if known else ExportError(message)
