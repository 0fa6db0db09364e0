"""One worker's engine: pages, prefix cache, scheduling (pure), and the runners that compute (torch).

Decides what each step computes, who is preempted, and which cached pages are reused. Begin at `scheduler.py`;
`kvcache.py` gives out pages, `step.py` is the contract with runners. Must not know of routers, of deadlines,
or how KV travels.
"""
