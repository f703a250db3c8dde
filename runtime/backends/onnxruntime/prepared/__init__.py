"""Prepared backbones: matrices are packed once for this processor, into files that loads then map."""

FOLDER = "prepared"  # in the user's cache folder
