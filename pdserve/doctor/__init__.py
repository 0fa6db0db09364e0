"""Looks for what keeps a machine or a cluster from serving: gathers facts, and checks them."""
