"""Kernels for CPUs: C sources, compiled for the machine's processor, and Python functions that check arguments."""
