"""Graph parts of single model families: AltUp, experts, n-grams, per-layer embeddings, ranges."""
