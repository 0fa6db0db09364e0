"""Measure a cluster from outside, as its clients see it."""
