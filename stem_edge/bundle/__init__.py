"""Bundles: their manifest, sizes, checksums, edits, and fetching them from a hub.

The layout of records is in stem_edge.tables; the code that runs a bundle is in stem_edge.runtime.
"""
