"""Simulated clusters of the real cores: with faults (`faults`), and for capacity (`capacity`)."""
