"""The onnxruntime engine: its loaders, sessions, slots and memory, on the CPU and on accelerators."""
