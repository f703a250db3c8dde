"""Files that hold tensors, read as data: safetensors, torch archives and their pickle.

Nothing in them is unpickled or run. The meaning of tensors is in checkpoints.
"""
