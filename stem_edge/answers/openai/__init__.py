"""OpenAI's interfaces: completions, chat completions, responses."""
