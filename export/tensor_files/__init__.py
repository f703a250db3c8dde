"""Files that hold tensors, read as data: safetensors, GGUF, torch archives and their pickle.

Nothing in them is unpickled or run. The meaning of tensors is in checkpoints.
"""
