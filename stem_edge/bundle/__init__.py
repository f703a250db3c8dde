"""Bundles (exported models): manifest, sizes, checksums, edits of table rows, hub downloads."""
