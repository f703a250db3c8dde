"""Bundles: manifest, sizes and checksums, tables for analysis, and what trials found.

The layout of records is in tables; what runs a bundle is in runtime.
"""
