"""Bindings of the ggml library, and the layout of backbone.gguf, the file that ggml runs.

The engine that runs models on ggml is in runtime/backends/ggml.
"""
