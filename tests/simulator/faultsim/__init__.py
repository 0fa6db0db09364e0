"""Simulated clusters with faults, around the real cores."""
