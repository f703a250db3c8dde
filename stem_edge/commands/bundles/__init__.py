"""Commands that make, show, check, edit, list and delete bundles."""
