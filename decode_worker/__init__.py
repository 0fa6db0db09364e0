"""Turn granted KV pages into tokens, in one continuous batch."""
