"""Turn prompts into KV pages and a first token, and hand them to decode workers."""
