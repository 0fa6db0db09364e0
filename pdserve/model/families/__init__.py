"""A file for each model family, which reads its config.json as a `Design`. Free of torch.

`config.FAMILIES` lists them. Each reads every key that changes a result, and asks for the one value that is computed
with where there are others: a key that nobody has looked up is refused by name.
"""
