"""Files that hold tensors, read as data: safetensors, torch archives and their pickle.

Nothing in them is unpickled or run. What tensors mean is in checkpoints.
"""
