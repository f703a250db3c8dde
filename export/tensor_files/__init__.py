"""Reads tensors from files: safetensors, GGUF and torch archives. No code in a file is run."""
