"""Reads checkpoint folders with a config.json, from transformers or in this project's schema."""
