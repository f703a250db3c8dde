"""Add the graphs for accelerators to a bundle that has none, or write them anew.

    python tools/add_variants.py BUNDLE [--variants fp16 fp32 portable]

They follow from the graphs that the bundle has, so the checkpoint is not needed. The bundle is what
it was until the new one is complete: everything else is linked from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stem_edge.bundle import Bundle
from stem_edge.errors import StemEdgeError
from stem_edge.export.variant_files import add_variants
from stem_edge.graph_io import VARIANTS, Variant
from stem_edge.units import format_size


def described(bundle: Bundle) -> str:
    """What the graphs of its variants take, and why there are not more."""
    manifest = bundle.manifest
    files = [name for name in manifest.files if name.startswith(("device.", "portable."))]
    nbytes = sum(manifest.files[name].nbytes for name in files)
    share = nbytes / manifest.nbytes
    variants = manifest.backbone.variants if manifest.backbone else ()
    lines = [f"{', '.join(variants) or 'no variants'}: {format_size(nbytes)}, {share:.2%} of all"]
    return "\n".join([*lines, *manifest.reports["onnxruntime"].notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all that can be")
    args = parser.parse_args()
    wanted: list[Variant] | None = args.variants
    try:
        print(described(add_variants(args.bundle, wanted)))
    except StemEdgeError as error:
        sys.exit(f"add_variants: {error}")


if __name__ == "__main__":
    main()
