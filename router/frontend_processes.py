"""Runs frontends in processes of their own, and starts another when one has ended.

Invariant: when a frontend ends, only its own connections are lost; their requests are cancelled, and nothing of them is
left. When the router's process ends, all frontends end.
"""

import asyncio
import logging
import os
import socket
import sys
from asyncio import FIRST_COMPLETED
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress

from pdserve.errors import CommandError, ConfigError
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.channel import Abort, Stop
from pdserve.router.frontend.endpoints import Endpoints, check_endpoints, http_url
from pdserve.router.frontend_link import FrontendLink
from pdserve.router.hub import Hub
from pdserve.rpc import join_address

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pdserve.router.frontend.process")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 1.0  # for a process to end after its channel
STOP_TIMEOUT_S = 3.5  # for the last replies of HTTP and gRPC and the last spans; then the process is killed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before another frontend starts; doubled each time
STABLE_S = 60.0  # a frontend that ran for longer makes the pause short again
LOOK_S = 0.1  # between two looks at whether the router serves, which depends on time too
PING_S = 1.0  # between pings; a frontend may leave `frontend_link.MAX_UNANSWERED` unanswered


@asynccontextmanager
async def run_frontends(config: RouterConfig, hub: Hub) -> AsyncIterator[Endpoints]:
    """Serve clients in `num_frontends` processes for the length of the block.

    ConfigError where a port cannot be had, CommandError where a frontend ends as it starts.
    """
    check_endpoints(config)
    with ExitStack() as reserved:
        port = _reserve(config.host, config.port, "port", reserved)
        http_port = None
        if config.http_port is not None:
            http_port = _reserve(config.http_host, config.http_port, "http_port", reserved)
        frontends = Frontends(config.model_copy(update={"port": port, "http_port": http_port}), hub)
        async with asyncio.TaskGroup() as tasks:
            try:
                await frontends.start(tasks)
                public = join_address(config.host, port)
                http = "" if http_port is None else http_url(config, http_port)
                logger.info("%d frontends serve on %s %s", config.num_frontends, public, http)
                yield Endpoints(public, http, frontends.show)
            finally:
                await frontends.stop()


def _reserve(host: str, port: int, key: str, reserved: ExitStack) -> int:
    """Reserve a port (0: a free one) for this router's processes; return its number.

    The socket never listens. It is bound without SO_REUSEPORT, so a port in use is refused. SO_REUSEPORT is set
    afterwards, so that frontends can bind the port too.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            bound = reserved.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier router may linger
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address[0], port, *address[2:]))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = bound.getsockname()[1]
    except OSError as error:
        where = join_address(host, port)
        raise ConfigError(f"{key}: cannot listen on {where}: {error.strerror or error}") from error
    return port


async def _start(number: int, config: RouterConfig) -> tuple[socket.socket, Process]:
    """Start a frontend's process; return our end of its channel, and the process."""
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as failed:
        failed.enter_context(ours)
        arguments = *map(str, (theirs.fileno(), number, os.getpid())), config.model_dump_json()
        process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, pass_fds=(theirs.fileno(),), stdin=DEVNULL)
        failed.pop_all()
    return ours, process


async def _repeat(pause_s: float, action: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(pause_s)
        action()


class Frontends:
    """The frontends of a router."""

    def __init__(self, config: RouterConfig, hub: Hub) -> None:
        """`config`: with the numbers of the reserved ports."""
        self._config = config
        self._hub = hub
        self._links: set[FrontendLink] = set()
        self._kept: list[asyncio.Task[None]] = []  # one for each frontend
        self._looking: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Return once all endpoints are open. If a frontend ends before, its task raises CommandError."""
        self._count()
        opened = [asyncio.get_running_loop().create_future() for _ in range(self._config.num_frontends)]
        self._kept = [
            tasks.create_task(self._keep(number, first), name=f"frontend {number}")
            for number, first in enumerate(opened)
        ]
        self._looking = [
            tasks.create_task(_repeat(LOOK_S, self.show), name="readiness"),
            tasks.create_task(_repeat(PING_S, self._ping), name="frontends' pings"),
        ]
        await asyncio.wait(opened)

    async def stop(self) -> None:
        """Let all frontends close their endpoints, then end them."""
        self._stopping.set()
        for task in self._looking:
            task.cancel()
        for link in self._links:
            link.channel.post(Stop())
        if self._kept:
            await asyncio.wait(self._kept, timeout=STOP_TIMEOUT_S)
        for task in self._kept:
            task.cancel()

    def show(self) -> None:
        """Tell frontends whether the router serves."""
        readiness = self._hub.readiness()
        for link in self._links:
            link.show(readiness)

    def _ping(self) -> None:
        for link in self._links:
            if link.ready.done():
                link.ping()

    async def _keep(self, number: int, opened: asyncio.Future[None]) -> None:
        """Run a frontend, and another whenever one has ended. `opened` is set once the endpoints are open."""
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = loop.time()
            why = await self._run(number, opened)
            if self._stopping.is_set():
                return
            if not opened.done():
                raise CommandError(f"frontend {number} ended as it started: {why}")
            self._hub.num_frontends_lost += 1
            if loop.time() - began_s > STABLE_S:
                pause_s = FIRST_PAUSE_S
            logger.error("frontend %d has ended: %s; another one starts in %g s", number, why, pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run(self, number: int, opened: asyncio.Future[None]) -> str:
        """Run a frontend's process until it ends; return why it ended, or why it could not be started."""
        try:
            ours, process = await _start(number, self._config)
        except OSError as error:  # no process, descriptor or memory can be had at the moment
            return str(error)
        link, ended = FrontendLink(self._hub, self._abort), asyncio.ensure_future(process.wait())
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: link.channel, sock=ours)
            self._links.add(link)
            link.show(self._hub.readiness())
            await asyncio.wait((link.ready, link.lost, ended), timeout=START_TIMEOUT_S, return_when=FIRST_COMPLETED)
            if link.ready.done():
                self._count()
                if not opened.done():
                    opened.set_result(None)
            elif not ended.done():
                link.channel.close(f"its endpoints are not open after {START_TIMEOUT_S:g} s")
            await asyncio.wait((link.lost, ended), return_when=FIRST_COMPLETED)
            await asyncio.wait((link.lost, ended), timeout=END_TIMEOUT_S)
            link.channel.close("a process that it started has its channel")
            why = await link.lost
        finally:
            self._links.discard(link)
            self._count()
            with suppress(ProcessLookupError):
                process.kill()
            await ended
        return f"{why} (status {process.returncode})"

    def _count(self) -> None:
        self._hub.num_frontends = sum(link.ready.done() for link in self._links)

    def _abort(self, asked: Abort) -> None:
        for link in self._links:
            link.channel.post(asked)
