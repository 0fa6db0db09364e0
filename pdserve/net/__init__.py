"""How processes reach and identify each other: gRPC, certificates, tokens, names.

Decides who may listen and call beyond this machine. Begin at `rpc.py`. Must not know what is said.
"""
