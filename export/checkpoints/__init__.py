"""Readers of checkpoints, one for each trainer. They return the model's config and tensors.

tensor_files reads the file formats, such as safetensors.
"""
