"""The ggml engine: its loader, its graphs, its KV cache and its row cache slots."""
