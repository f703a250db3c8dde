"""Worker process that exports a checkpoint which a load was given, or fetches it from a hub.

Not a command for users: stem_edge.runtime.first_load.making starts it, and explains why. If that
is refused, the last line on stdout is "ErrorClass: message". Progress goes to stderr. At the end of stdin
it ends, because then the process that waits for it was killed.
"""

from __future__ import annotations

import io
import sys
import threading
import warnings
from typing import cast

from stem_edge.errors import StemEdgeError
from stem_edge.export.checkpoints.fetched import checkpoint_folder
from stem_edge.export.exporter import export_bundle
from stem_edge.graph.formats import EngineName
from stem_edge.progress import tell
from stem_edge.system.child import INTERRUPTED, REFUSED, end_with_parent


def main() -> int:
    """Run with the arguments CHECKPOINT OUT ENGINE SHOW, which is True, False or None as for Progress.

    If OUT is empty, fetch the checkpoint, and print its path.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # as it is read, whatever the user's encoding
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    checkpoint, out, engine, shown = sys.argv[1:]
    kind, show = cast(EngineName, engine), {"True": True, "False": False}.get(shown)
    warnings.showwarning = lambda message, *_, **__: tell(f"note: {message}", show)
    try:
        threading.Thread(target=end_with_parent, daemon=True).start()
        if not out:
            print(checkpoint_folder(checkpoint, show))
            return 0
        export_bundle(checkpoint, out, engine=kind, force=True, progress=show)
    except StemEdgeError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
