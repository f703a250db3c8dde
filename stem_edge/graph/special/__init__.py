"""What only some models need: several hidden states of a token, and ranges of activations."""
