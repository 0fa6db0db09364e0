"""The router: the public endpoints, admission, placement, and the life of each request.

Decides which worker computes what, and when a request is refused, moved or tried again. Begin at `requests/core.py`;
`placement` chooses, `frontend` speaks with clients, `shell.py` carries commands out. Must not import torch, nor know
how workers compute.
"""
