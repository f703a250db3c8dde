"""Prepared backbones: matrices packed once for this processor into files that are then mapped."""
