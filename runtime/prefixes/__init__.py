"""The prefix cache: KV caches of earlier prompts, which later calls continue from."""
