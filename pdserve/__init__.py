"""Serve large language models with prefill and decode on separate worker pools."""

__version__ = "0.1.0"
