"""Commands that measure a model, or plan how it will run."""
