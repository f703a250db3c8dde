"""Checkpoints with a config.json: folders as transformers writes them, and the schema of this project."""
