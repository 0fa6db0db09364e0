"""The settings of every process and their defaults.

Decides which values are allowed; what it refuses names the key. Begin at `config.py`. A default is written here and
nowhere else, but for those of routers (`router/config.py`).
"""
