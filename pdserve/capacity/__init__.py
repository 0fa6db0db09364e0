"""Capacity under virtual time: the router's and the workers' own cores, with a performance profile for an engine."""
