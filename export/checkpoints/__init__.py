"""Readers of checkpoints in the formats of Hugging Face, Meta Lingua, BlaGPT and llama.cpp."""
