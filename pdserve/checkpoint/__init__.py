"""Model files: config, weights, tokenizer and chat template, from a Hugging Face directory or a GGUF file."""
