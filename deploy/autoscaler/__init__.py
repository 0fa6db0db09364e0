"""Keeps each pool at the size that its policy and its demand ask for."""
