"""Commands that run a model: on a prompt, in a chat, for other programs, over a file."""
