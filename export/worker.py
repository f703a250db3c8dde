"""Worker process that exports a checkpoint which a load was given.

Not a command for users: stem_edge.runtime.first_load.made starts it, and explains why. If the export
is refused, the last line on stdout is "ErrorClass: message". A bar goes to stderr.
"""

from __future__ import annotations

import sys
from typing import cast

from stem_edge.errors import StemEdgeError
from stem_edge.export.exporter import export_bundle
from stem_edge.export.job.options import ExportEngine

REFUSED, INTERRUPTED = 11, 130


def main() -> int:
    """Run with the arguments CHECKPOINT OUT ENGINE SHOW, which is empty for no bar."""
    checkpoint, out, engine, show = sys.argv[1:]
    kind = cast(ExportEngine, engine)
    try:
        export_bundle(checkpoint, out, engine=kind, force=True, progress=bool(show))
    except StemEdgeError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
