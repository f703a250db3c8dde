"""The ggml engine: its loader, its graphs, its row cache slots, and a trial run of the library."""
