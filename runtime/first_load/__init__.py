"""Bundles that `load` makes from checkpoints."""
