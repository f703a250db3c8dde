"""Text in token ids and back, and chat prompts."""
