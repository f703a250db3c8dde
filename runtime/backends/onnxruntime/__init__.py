"""The backbone on onnxruntime: sessions over graphs that are built here, on CPU and devices."""
