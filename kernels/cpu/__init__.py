"""Kernels for CPUs: C sources, compiled for the processor at hand, and Python functions that check what they pass."""
