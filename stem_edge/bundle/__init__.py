"""Bundles: their manifest, sizes, checksums, edits, and fetching them from a hub.

The layout of records is in tables; what runs a bundle is in runtime.
"""
