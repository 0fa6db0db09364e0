"""Checks and benchmarks that need a GPU: `python3 kernels/gpu/__main__.py [check] [bench] [tune]`."""
