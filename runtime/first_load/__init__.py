"""Bundles that are made of checkpoints when these are loaded, and the safety check of bundles."""
