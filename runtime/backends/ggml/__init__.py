"""The backbone on ggml: a graph for each shape, over weights that stay in the mapped file."""
