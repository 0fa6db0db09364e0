"""One worker's engine: pages, prefix cache, scheduling (pure) and the runner that computes (torch)."""
