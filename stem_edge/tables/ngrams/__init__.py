"""Rows that several tokens pick together: which ones they are, and how they lie on flash."""
