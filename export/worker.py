"""Worker process in which `load` exports a checkpoint, or fetches one from a hub.

Not a command for users: stem_edge.runtime.first_load.making starts it, and explains why. Progress goes to
stderr. If the work fails, the last line on stdout is "ErrorClass: message". The worker ends when its stdin
is closed, which happens when the parent is killed.
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
    """Export a checkpoint. Arguments: CHECKPOINT OUT ENGINE SHOW; SHOW is True, False or None.

    SHOW is the option `progress` of export_bundle. If OUT is empty, only fetch the checkpoint and print its path.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # because the parent decodes UTF-8
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
