"""Between text and token ids: tokenizing, detokenizing, stop strings, chat templates.

Decides where an answer's text ends. Begin at `tokenizer.py`. Must not import torch, nor know of workers.
"""
