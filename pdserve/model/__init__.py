"""Models of the Llama family, and the files they come from."""
