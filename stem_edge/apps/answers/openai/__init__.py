"""OpenAI's two interfaces: completions and chat completions."""
