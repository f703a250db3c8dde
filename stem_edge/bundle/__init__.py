"""Bundles: their manifest, sizes, checksums, and tables for analysis.

The layout of records is in tables; what runs a bundle is in runtime.
"""
