"""Commands that run a model: on a prompt, in a chat, as a server, over a file of prompts."""
