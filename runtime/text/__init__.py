"""Text in token ids and back, chat prompts, where words stand in a prompt."""
