"""Engines that run a model's backbone (onnxruntime, ggml), load options and the memory plan."""
