"""Reads tensors from files: safetensors, GGUF and torch archives. No code in a file is run.

The package `checkpoints` knows the meaning of the tensors.
"""
