"""Bundles (exported models): manifest, sizes, checksums, edits of table rows, fetching from a hub.

The layout of records is in stem_edge.tables; the code that runs a bundle is in stem_edge.runtime.
"""
