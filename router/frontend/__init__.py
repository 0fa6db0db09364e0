"""Everything between clients and a router's core: doors, checks, tokens, text, and who may ask for how much."""
