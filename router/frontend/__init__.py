"""Everything between clients and a router's core: endpoints, checks, tokens, text, and limits of tenants."""
