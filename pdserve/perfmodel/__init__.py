"""How long engine steps and transfers take: measured profiles, and models that learn from what workers report."""
