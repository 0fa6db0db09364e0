"""Worlds in which the real decisions run without the real machines."""
