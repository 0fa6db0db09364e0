"""What both kinds of worker share: the core that decides, and the shell that drives it.

Decides what becomes of each placement: computed, handed off, moved, given up. Begin at `core.py`; `turns.py` says in
which order things happen, `server.py` starts a process. Must not import torch: its device is an `Executor`.
"""
