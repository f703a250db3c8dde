"""Perplexity, divergence, the lm-evaluation-harness."""
