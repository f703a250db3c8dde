"""Readers of checkpoints in the formats of Hugging Face, Meta Lingua, BlaGPT and llama.cpp.

They return the model's config and tensors. tensor_files reads the file formats, such as safetensors.
"""
