"""Bundles that `load` makes from checkpoints, and the safety check of bundles."""
