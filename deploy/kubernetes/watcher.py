"""Watches pods, and reports each process that has ended to every router."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress

import grpc
import msgspec

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.ids import Incarnation, WorkerId
from pdserve.base.signals import drain_on_signals
from pdserve.kubernetes.client import ApiError, Backoff, Client, RefusedError, UnreachableError
from pdserve.kubernetes.ends import Ended, Ends
from pdserve.kubernetes.objects import NODE_LEASES, Lease, Node, Object, Pod, Status
from pdserve.net.dns import addresses_of, check_names
from pdserve.net.health import answering
from pdserve.net.operator_client import AdminClient
from pdserve.observe.metrics import REPORTED_ENDS, UNPROVED_ENDS, Sample
from pdserve.observe.metrics_server import showing
from pdserve.settings.autoscaler import WatcherConfig

logger = logging.getLogger(__name__)

GONE = 410  # the API no longer has the version that a watch is to begin at
MAX_FAILURES = 5  # in a row, after which all pods are listed again: the version itself may be what fails
LOOK_S = 2.0  # between two looks at what is attached to routers
NODE_S = 5.0  # between two looks at nodes of which an answer is awaited
CALL_S = 5.0  # of each call of a router, and of what is asked about a node
MAX_WARNED = 1024
MAX_REPORTS = 64  # that are kept, for routers that are found later

Routers = Callable[[], Awaitable[Sequence[AdminClient]]]  # all there are at the moment


class _Line(Object, frozen=True):
    type: str
    object: msgspec.Raw


def _read(text: bytes) -> tuple[str, Pod]:
    """Return what a line of a watch brings; RefusedError where it ends the watch, or cannot be read."""
    try:
        line = msgspec.json.decode(text, type=_Line)
        if line.type == "ERROR":
            status = msgspec.json.decode(line.object, type=Status)
            raise RefusedError(status.code, status.message)
        return line.type, msgspec.json.decode(line.object, type=Pod)
    except msgspec.MsgspecError as error:
        raise RefusedError(GONE, f"a watch sent something else: {error}") from error


class Troubles:
    """Logs an error when it begins or changes, and not each time that it recurs."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # what was logged last, by what failed

    @contextmanager
    def logged(self, what: str) -> Iterator[None]:
        """Swallow an error of the block, and log it unless it is the same as the last time."""
        try:
            yield
        except (OSError, ApiError, grpc.aio.AioRpcError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            cause = details or "no answer"
            if self._known.get(what) != cause:
                logger.warning("%s: %s", what, cause)
            if len(self._known) >= MAX_WARNED:
                self._known.clear()
            self._known[what] = cause
        else:
            self._known.pop(what, None)


class PodWatcher:
    """Watches the pods of a namespace."""

    def __init__(self, client: Client, namespace: str, routers: Routers, clock: Clock) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._routers = routers
        self._clock = clock
        self._ends = Ends()
        self._reports: deque[Ended] = deque(maxlen=MAX_REPORTS)
        self._news = asyncio.Event()
        self._delivered: dict[str, int] = {}  # reports that a router has, by its address
        self._troubles = Troubles()
        self.num_reported = 0  # processes, since the start

    def samples(self) -> Iterator[Sample]:
        yield Sample(REPORTED_ENDS, self.num_reported)
        yield Sample(UNPROVED_ENDS, self._ends.num_unproved)

    async def run(self) -> None:
        """Go on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._look())
            tasks.create_task(self._ask_nodes())

    async def _follow(self) -> None:
        """List all pods, then follow each change, for ever; list all of them again where changes were missed.

        Invariant: what `Ends` is given, in order, is the state that the API had at some moment, and a later one each
        time, unless the API itself was restored from a backup.
        """
        backoff, version, warning, failures = Backoff(), "", "", 0
        while True:
            error: ApiError | None = None
            try:
                if not version:
                    pods, version = await self._client.pods(self._path)
                    failures = 0
                    self._report(self._ends.listed(pods, self._clock.now_s()))
                async with aclosing(self._client.changes(self._path, version)) as lines:
                    async for text in lines:
                        kind, pod = _read(text)
                        version = pod.metadata.resource_version or version
                        backoff.reset()
                        warning, failures = "", 0
                        self._report(self._changed(kind, pod))
            except ApiError as raised:
                error = raised
                failures += 1
                is_gone = isinstance(error, RefusedError) and error.status == GONE
                # An API that was restored from a backup is silent on a version that it has yet to reach.
                if is_gone or isinstance(error, UnreachableError) or failures >= MAX_FAILURES:
                    version = ""
                if not is_gone and str(error) != warning:
                    warning = str(error)
                    logger.warning("%s: changes are not seen: %s", self._path, error)
            await backoff.wait(error)

    def _changed(self, kind: str, pod: Pod) -> list[Ended]:
        """Note a change of a pod; return which processes have ended. A deleted pod is what it was at last."""
        if kind == "BOOKMARK":
            return []
        return self._ends.removed(pod, self._clock.now_s()) if kind == "DELETED" else self._ends.changed(pod)

    def _report(self, ended: Sequence[Ended]) -> None:
        for each in ended:
            logger.info("%s, process %d, has ended", each.worker_id, each.incarnation)
            self._reports.append(each)
            self.num_reported += 1
        if ended:
            self._news.set()

    async def _look(self) -> None:
        """Read each router's status and deliver reports: every LOOK_S, and at once where there are new ones."""
        while True:
            self._news.clear()
            with self._troubles.logged("routers' names"):
                routers = await self._routers()
                self._delivered = {each.address: self._delivered.get(each.address, 0) for each in routers}
                async with asyncio.TaskGroup() as tasks:
                    for router in routers:
                        tasks.create_task(self._meet(router))
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _meet(self, router: AdminClient) -> None:
        """Note a router's processes, and deliver the reports that it does not have."""
        with self._troubles.logged(f"router {router.address}"):
            try:
                async with asyncio.timeout(CALL_S):
                    status = await router.status()
                for seen in status.workers:
                    self._ends.attached(seen.registration.incarnation, seen.registration.launch_id)
                await self._deliver(router)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._delivered[router.address] = 0  # another process may answer there the next time
                raise

    async def _deliver(self, router: AdminClient) -> None:
        first = self.num_reported - len(self._reports)
        waiting = list(self._reports)[max(0, self._delivered[router.address] - first) :]
        for index, each in enumerate(waiting, self.num_reported - len(waiting) + 1):
            worker, incarnation = WorkerId(each.worker_id), Incarnation(each.incarnation)
            async with asyncio.timeout(CALL_S):
                await router.report_gone(worker, incarnation, CALL_S, from_outside=each.from_outside)
            self._delivered[router.address] = index

    async def _ask_nodes(self) -> None:
        while True:
            for name in self._ends.nodes:
                with self._troubles.logged(f"node {name}"):
                    async with asyncio.timeout(CALL_S):
                        gone = await self._node(name)
                        if gone:
                            await self._confirm(gone)
            await asyncio.sleep(NODE_S)

    async def _confirm(self, uids: set[str]) -> None:
        """Report the processes of these pods as ended, if a list that is read now has none of them."""
        pods, _ = await self._client.pods(self._path)
        self._report(self._ends.listed(pods, self._clock.now_s()))
        self._report(self._ends.proved(uids - {pod.metadata.uid for pod in pods}))

    async def _node(self, name: str) -> set[str]:
        """Read a node and its Lease; return the uids of its removed pods whose processes must have ended."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NODE_LEASES}/leases/{name}"
        renewed, is_ready = "", False
        try:
            node = await self._client.get(f"/api/v1/nodes/{name}", Node)
            if node.is_off:
                return self._ends.off(name)
            renewed, is_ready = (await self._client.get(path, Lease)).spec.renew_time or "", node.is_ready
        except RefusedError as error:
            if error.status != 404:
                raise
        return self._ends.asked(name, renewed, is_ready=is_ready, at_s=self._clock.now_s())


async def serve(config: WatcherConfig) -> None:
    """Watch until a signal comes. ConfigError where a router's name is none, or this process has no account."""
    stop = asyncio.Event()
    check_names(config.routers, "routers")
    first = AdminClient(config.routers[0], config.secret_file, config.identity_dir)  # reads its files once for all

    async def routers() -> list[AdminClient]:
        return [first.at(address) for address in await addresses_of(config.routers)]

    async with AsyncExitStack() as stack:
        stack.enter_context(drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s))
        client = await stack.enter_async_context(Client.connected())
        watcher = PodWatcher(client, client.namespace, routers, MonotonicClock())
        health = await stack.enter_async_context(answering(config))
        await stack.enter_async_context(showing(config, watcher.samples, first.credentials.identity))
        health.start(lambda: not stop.is_set())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watcher.run())
            await stop.wait()
            task.cancel()
