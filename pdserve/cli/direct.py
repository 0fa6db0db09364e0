"""A worker that answers clients itself: its process also runs a router, which places requests on this worker only.

The worker computes such requests from prompt to end; requests of other routers share its steps. The router and the
worker are linked as usual, over loopback and without TLS. Draining is as usual, too: the requests of the worker's own
clients are finished, and the router ends after the worker.
"""

import asyncio

from pdserve.base.signals import CLOSING_S
from pdserve.executor.threads import Seat
from pdserve.net.rpc import check_bind
from pdserve.router import server as router
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.served import load_model
from pdserve.settings.config import WorkerConfig
from pdserve.worker import server as worker


async def serve(config: WorkerConfig, seat: Seat | None = None) -> None:
    """Run a worker and its router until the worker has drained. ConfigError if a port cannot be bound."""
    own = _of_router(config)
    model = await asyncio.to_thread(load_model, own)
    stop = asyncio.Event()
    listening: asyncio.Future[router.Addresses] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        running = router.run(own, model, stop, listening.set_result, port_key="dialect_port")
        tasks.create_task(running, name="own router")
        try:
            at = await listening
            await worker.serve(config, seat, worker.OwnRouter(at.internal, CLOSING_S, at.counted))
        finally:
            stop.set()


def _of_router(config: WorkerConfig) -> RouterConfig:
    """Return the settings of a worker's own router. ConfigError if strangers could reach it."""
    has_identity = config.ssl_certfile is not None and config.api_keys_file is not None
    remedy = "set ssl_certfile, ssl_keyfile and api_keys_file, or dialect_host to 127.0.0.1"
    check_bind(config.dialect_host, has_identity=has_identity, key="dialect_host", remedy=remedy)
    own = {
        "router_id": config.worker_id,
        "host": config.dialect_host,
        "port": config.dialect_port,
        "internal_port": 0,
        "local_prefill": True,
        "metrics": False,
        "pool_grace_s": 0.0,  # while the worker loads or drains, clients should try another one
    }
    return RouterConfig.model_validate({name: getattr(config, name) for name in _SHARED} | own)


_SHARED = (
    *("model", "served_model_name", "secret_file", "ssl_certfile", "ssl_keyfile", "api_keys_file"),
    *("otlp_traces_endpoint", "drain_timeout_s", "log_level", "log_format"),
)
