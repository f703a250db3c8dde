"""Quality of a bundle: perplexity, and divergence from a reference."""
