"""The onnxruntime engine: loaders, sessions, slots and memory, on the CPU and accelerators."""
