"""Prepared backbones: matrices are packed for this processor once, into files that later loads map."""
