"""Graph parts that only some models have: AltUp, experts, n-grams, per-layer embeddings, ..."""
