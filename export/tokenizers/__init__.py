"""Converts every kind of tokenizer to a Hugging Face tokenizer.json."""
