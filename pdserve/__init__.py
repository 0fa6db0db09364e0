"""Serve large language models with prefill and decode on separate worker pools.

Begin at `router/requests/core.py` and `worker/core.py`, which decide, or at `cli/app.py`, which starts all processes.
"""

import os

__version__ = "0.1.0"

# gRPC reads this as it is imported. Its fork handlers are for children that go on using it; every child here becomes
# another program at once. They stop all of gRPC's threads, and now and then end the child, or abort the parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
