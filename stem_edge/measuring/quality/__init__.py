"""Quality of a bundle: perplexity, divergence from a reference, the lm-evaluation-harness."""
