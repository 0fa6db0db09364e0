"""Routers' cores and frontends, joined by streams in memory."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from router_driver import LENGTH, PROMPT, Driver

from pdserve.base.clock import MonotonicClock
from pdserve.base.ids import RequestId
from pdserve.capacity.wires import Delta
from pdserve.observe.metrics import Distribution, Metric
from pdserve.protocol.refusal import Refused
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.config import FrontendConfig, RouterConfig
from pdserve.router.frontend.channel import Channel, core_decoder
from pdserve.router.frontend.routers import RouterLink, Routers
from pdserve.router.frontend_link import FrontendLink
from pdserve.router.local_backend import LocalBackend
from pdserve.router.requests.commands import Deliver, Finished, Place
from pdserve.router.requests.events import ClientEvent, RequestArrived, StepReported
from pdserve.router.shell import Shell

ONE = RequestId(bytes(16))
SECRET = Path("secret")


def new_frontend(**settings: object) -> Routers:
    given = {"model": "m", "secret_file": SECRET, "routers": ("router:1",), **settings}
    return Routers(FrontendConfig.model_validate(given))


class Stream:
    """A stream between two ends of a channel."""

    def __init__(self, one: Channel, other: Channel) -> None:
        there: asyncio.Queue[bytes | None] = asyncio.Queue()
        back: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ends = [
            asyncio.create_task(self._run(one, back, there)),
            asyncio.create_task(self._run(other, there, back)),
        ]

    async def _run(
        self, channel: Channel, read: "asyncio.Queue[bytes | None]", write: "asyncio.Queue[bytes | None]"
    ) -> str:
        try:
            return await channel.run(read.get, write.put)
        finally:
            write.put_nowait(None)

    async def whys(self) -> list[str]:
        """Return why each end has ended, once both have."""
        return await asyncio.gather(*self._ends)


class Core:
    """A router's core with a pair of workers, and the links of its frontends."""

    def __init__(self, *, has_workers: bool = True, is_stopping: Callable[[], bool] = lambda: False) -> None:
        driver, clock = Driver(), MonotonicClock()
        driver.now_s = clock.now_s()
        if has_workers:
            self.worker, _ = driver.pair()
        self.core = driver.core
        self.shell = Shell(driver.core, clock)
        config = RouterConfig(model="m", secret_file=SECRET, serve_clients=False)
        self.backend = LocalBackend(self.shell, config, "m", is_stopping)
        self._channels: list[Channel] = []

    async def link(self, ours: Channel) -> tuple[FrontendLink, Stream]:
        """Connect a frontend's end of a channel."""
        link = FrontendLink(self.backend, lambda _abort: None)
        link.show(self.backend.readiness())
        self._channels += [ours, link.channel]
        return link, Stream(link.channel, ours)

    async def peer(self) -> tuple[Channel, FrontendLink, Stream]:
        """Connect a channel that does what the test says, and nothing else."""
        ours = Channel(core_decoder, lambda _message: None)
        return ours, *await self.link(ours)

    async def frontend(self, routers: Routers | None = None) -> tuple[Routers, "Attached"]:
        """Attach a frontend; return it, once it knows whether the router serves."""
        routers = routers or new_frontend()
        theirs = RouterLink("router:1", routers)
        link, stream = await self.link(theirs.channel)
        routers.attach(theirs)
        known = asyncio.Event()
        look = routers.look

        def note() -> None:
            look()
            known.set()

        routers.look = note  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await known.wait()
        routers.look = look  # type: ignore[method-assign]
        return routers, Attached(link, theirs, stream, routers)

    async def close(self) -> None:
        for channel in self._channels:
            channel.close("the test is over")
        await asyncio.sleep(0)

    def tokens(self, *ids: int, index: int = 0, end: int = 0, position: int = 0, attempt: int = 0) -> None:
        self.shell.post(StepReported(self.worker, [Delta(ONE, attempt, index, position, ids, end)]))

    def count(self, metric: Metric, *labels: str) -> float | Distribution:
        """Return what the router counted of its requests' ends."""
        return next(
            each.amount for each in self.backend.outcomes.samples() if (each.metric, each.labels) == (metric, labels)
        )

    def check_nothing_held(self, link: FrontendLink) -> None:
        assert not link._answers
        assert not link._replies
        assert not any(use.num_running for use in self.backend.tenants._uses.values())
        self.core.check_idle()
        assert not self.shell.broken.done()


class Attached:
    """Both ends of a frontend's stream to a router."""

    def __init__(self, link: FrontendLink, theirs: RouterLink, stream: Stream, routers: Routers) -> None:
        self.link = link
        self.theirs = theirs
        self._stream = stream
        self._routers = routers

    async def lose(self, why: str = "its router was killed") -> None:
        """End the stream, for both ends."""
        self.theirs.channel.close(why)
        await self.lost()

    async def lost(self) -> list[str]:
        """Return why the stream has ended, by its ends, once both have taken note of it."""
        whys = await self._stream.whys()
        self.link.end()
        self._routers.lose(self.theirs)
        return whys


async def settle(routers: Routers) -> None:
    """Return once all that a frontend sent has been taken, what that led to has come back, and was answered."""
    for _ in range(3):
        await asyncio.sleep(0)
        await routers.engine()


def placed(core: Core) -> list[Place]:
    """Return from now on what the core places."""
    found: list[Place] = []
    handle = core.core.handle

    def watch(event: object, now_s: float) -> list[object]:
        commands = handle(event, now_s)  # type: ignore[arg-type]
        found.extend(command for command in commands if isinstance(command, Place))
        return commands  # type: ignore[return-value]

    core.core.handle = watch  # type: ignore[assignment]
    return found


class Reader:
    """Waits for an answer at a frontend; `Answer` and `Intake` in one."""

    def __init__(
        self, routers: Routers, news: ClientEvent | None = None, reads: Finished | Refused | None = None
    ) -> None:
        self.tokens: dict[int, list[int]] = {}  # by continuation
        self.num_scored = 1
        self.ended: asyncio.Future[Finished | Refused] = asyncio.get_running_loop().create_future()
        self._routers = routers
        self._news = news  # of each token
        self._reads = reads  # how it ended for the client, where that differs from what the core says

    def deliver(self, command: Deliver) -> ClientEvent | None:
        if command.prompt_logprobs is not None:
            self.num_scored += len(command.prompt_logprobs)
            return None
        self.tokens.setdefault(command.index, []).extend(command.token_ids)
        return self._news

    def end(self, outcome: Finished | Refused) -> None:
        self._routers.outcomes.end(arrival(), self._reads or outcome, [LENGTH])
        self.ended.set_result(outcome)


def arrival(n: int = 1, max_tokens: int = 1, **changes: object) -> RequestArrived:
    now_s = MonotonicClock().now_s()
    params = SamplingParams(max_tokens=max_tokens, n=n)
    event = RequestArrived(ONE, PROMPT, params, now_s, now_s + 60, tenant="acme", ttft_slo_s=1.0)
    return replace(event, **changes)  # type: ignore[arg-type]
