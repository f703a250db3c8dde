"""Commands that make, show, check and change bundles, and what is kept of them."""
