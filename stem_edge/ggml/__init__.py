"""ggml: its library through ctypes, its check before use, its file format.

The engine that runs models on it is runtime/backends/ggml.
"""
