"""Prepared backbones: matrices are packed once for this processor, into files that loads then map."""
