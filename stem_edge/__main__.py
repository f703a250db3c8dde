"""`python -m stem_edge` is the command `stem-edge`."""

import sys

from stem_edge.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
