"""Structured output: restricts tokens by a JSON Schema, a regular expression or a grammar."""
