"""ggml: bindings through ctypes, a test of the library before use, and the layout of GGUF files.

The engine that runs models on ggml is in runtime/backends/ggml.
"""
