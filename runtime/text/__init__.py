"""Text to token ids and back, and chat prompts."""
