"""Every kind of tokenizer as one tokenizer.json."""
