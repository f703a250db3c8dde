"""Checkpoints: whose it is, what it describes, which tensors it has.

A reader for each trainer; how tensors lie in files is in tensor_files.
"""
