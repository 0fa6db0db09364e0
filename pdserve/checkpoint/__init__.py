"""Model files: config, weights, tokenizer and chat template, from a Hugging Face directory or a GGUF file.

Decides which files are read, and refuses what no model here can use. Begin at `open.py`. Must not know how a model
computes, nor where its weights will lie.
"""
