"""Readers of checkpoints, one for each trainer: the model that they describe, and its tensors.

The formats of files that hold tensors are in tensor_files.
"""
