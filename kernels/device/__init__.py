"""The Triton bodies: launched by the wrappers one level up, which check what these assume."""
