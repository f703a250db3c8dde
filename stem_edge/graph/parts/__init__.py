"""Parts of attention and FFN that few models have."""
