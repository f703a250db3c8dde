"""A bundle: its manifest, sizes and checksums, its tables for analysis, what trials of it found.

How records are laid out is in tables; who runs a bundle, in runtime.
"""
