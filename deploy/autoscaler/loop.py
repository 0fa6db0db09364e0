"""Observe, decide, act, again and again: one cluster's autoscaler between its actuator, its routers and its policy."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grpc

from pdserve.autoscaler.actuator import Actuator
from pdserve.autoscaler.decisions import Action, ActuatorError, Add, Decision, Drain, Flip
from pdserve.autoscaler.explain import changes
from pdserve.autoscaler.journal import Journal
from pdserve.autoscaler.observation import Listed, Observation, Observer
from pdserve.autoscaler.policy import Autoscaler
from pdserve.autoscaler.schema import Policy, load
from pdserve.autoscaler.supply import Result
from pdserve.base.clock import Clock
from pdserve.base.errors import CommandError, ConfigError, ProtocolError
from pdserve.base.roles import Role
from pdserve.launch.folder import read_state
from pdserve.launch.plan import Wiring
from pdserve.net.dns import addresses_of
from pdserve.net.operator_client import AdminClient
from pdserve.proto.v1 import admin_pb2 as admin

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0  # of a router; one that needs longer counts as silent

WarmUp = Callable[[Policy], Sequence[tuple[float, float]]]  # earlier demand, as `Autoscaler` takes it
Announce = Callable[[Role, str, str], None]  # pool, verb, and the decision in words


@dataclass(frozen=True)
class Target:
    """Where a cluster is reached."""

    routers: tuple[str, ...]  # internal ports, host:port; each address that a host's name leads to is a router
    secret_file: Path
    identity_dir: Path | None = None  # an operator's, where the cluster asks for certificates
    launcher: str = ""  # host:port of its launcher, where it has one
    record_file: Path | None = None  # where decisions are written for other commands
    name: str = ""  # of a cluster of this machine
    elsewhere: Wiring | None = None  # of its workers, where they are started on other machines

    @cached_property
    def router(self) -> AdminClient:
        """A connection to the first router. The others share the credentials that it has read."""
        return AdminClient(self.routers[0], self.secret_file, self.identity_dir)

    async def clients(self) -> list[AdminClient]:
        """Return connections to all routers; OSError where their names lead nowhere now."""
        return [self.router.at(address) for address in await addresses_of(self.routers)]

    async def statuses(self) -> list[admin.ClusterStatus]:
        """Return what all routers report."""
        return [await router.status() for router in await self.clients()]

    async def report(self, decisions: Sequence[str]) -> None:
        """Report to all routers what was decided. One that cannot be reached misses it."""
        routers = await self.clients()
        async with asyncio.TaskGroup() as tasks:
            for router in routers:
                tasks.create_task(_reported(router, decisions), name="report")

    def check(self) -> None:
        """Raise where the cluster has ended: ConfigError, or CommandError where another one has its name."""
        if self.name and read_state(self.name).launcher != self.launcher:
            raise CommandError(f"the cluster named {self.name!r} has been started again")


class PolicyFile:
    """A policy file, and what it held when it was last read."""

    def __init__(self, path: Path, warm_up: WarmUp) -> None:
        """ConfigError names what is wrong with the policy, or with the trace from which it learns."""
        self.path = path
        self._warm_up = warm_up
        self.policy = load(path)
        self.earlier = warm_up(self.policy)  # demand, as `Autoscaler` takes it
        self.problem = ""  # why what the file holds now is not followed
        self._text = _text_of(path)

    def changed(self) -> tuple[str, ...]:
        """Read the file if it has changed, and follow its policy as a whole; return what that changes, if anything.

        ConfigError, once for each content, where the policy is not valid or has another actuator: the old one stays.
        """
        text = _text_of(self.path)
        if text == self._text:
            return ()
        self._text, self.problem = text, ""
        try:
            policy = load(self.path)
            if policy.actuator != self.policy.actuator:
                other = "; ".join(changes(self.policy.actuator, policy.actuator, "actuator"))
                raise ConfigError(f"{self.path}: {other}: an actuator changes only with a new start of the autoscaler")
            earlier = self._warm_up(policy)
        except ConfigError as error:
            self.problem = str(error)
            raise
        before, self.policy, self.earlier = self.policy, policy, earlier
        return tuple(changes(before, policy))


def _text_of(path: Path) -> bytes | None:
    """Return what a file holds; None where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


class Loop:
    """One autoscaler."""

    def __init__(
        self,
        file: PolicyFile,
        target: Target,
        actuator: Actuator,
        journal: Journal,
        clock: Clock,
        announce: Announce = lambda _pool, _verb, _text: None,
    ) -> None:
        """`announce` shows an order, or that one has failed."""
        self.file = file
        self._target = target
        self._actuator = actuator
        self._journal = journal
        self._clock = clock
        self._announce = announce
        self._observer = Observer()
        self._core = Autoscaler(file.policy, file.earlier)
        self._warning = ""
        self._noted: list[str] = []  # in this step
        self.decisions: tuple[Decision, ...] = ()  # the last ones
        self.last_orders = ""  # in words, of the last step that gave any
        self.observation: Observation | None = None  # the last one
        self.num_decided = Counter[tuple[str, ...]]()  # by pool, verb and what binds

    async def run(self, stop: asyncio.Event) -> None:
        """Begin anew, and go on until asked to stop, at the end of a step.

        Raises what the target's `check` does once the cluster has ended.
        """
        self._observer, self._core = Observer(), Autoscaler(self.file.policy, self.file.earlier)
        self.decisions, self.last_orders, self.observation = (), "", None
        while not stop.is_set():
            began_s = self._clock.now_s()
            await self.step()
            with suppress(TimeoutError):
                async with asyncio.timeout(began_s + self.file.policy.interval.react_s - self._clock.now_s()):
                    await stop.wait()

    async def step(self) -> None:
        """Observe, decide and act once. Nothing is decided without an answer of the actuator."""
        self._follow_policy()
        try:
            listed = await self._actuator.observe()
        except ActuatorError as error:
            self._target.check()
            self._warn(f"nothing is decided: {error}")
        else:
            await self._decide(listed)
        self._journal.write(self.decisions)
        await self._report()

    async def _report(self) -> None:
        """Report this step's notes to the routers. Where these do not answer, the journal alone has them."""
        noted, self._noted = self._noted, []
        if noted:
            with suppress(OSError, grpc.aio.AioRpcError):
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await self._target.report(noted)

    async def _decide(self, listed: Sequence[Listed]) -> None:
        self.observation = self._observe(listed, await self._statuses())
        self.decisions = self._core.decide(self.observation)
        self.num_decided.update((each.pool, each.verb, each.binds) for each in self.decisions)
        self.last_orders = "\n".join(each.text for each in self.decisions if each.action) or self.last_orders
        for text in self._journal.news(self.decisions):
            self._note(text)
        async with asyncio.TaskGroup() as tasks:
            for decision in self.decisions:
                if decision.action is not None and not decision.advisory:
                    self._announce(decision.pool, decision.verb, decision.text)
                    tasks.create_task(self._order(decision.action))
        for outcome in self._core.take_outcomes():
            if outcome.result is not Result.DONE:
                text = f"{outcome.action}: {outcome.result}{': ' if outcome.reason else ''}{outcome.reason}"
                self._note(text, logging.WARNING)
                for pool in outcome.effects:
                    self._announce(pool, outcome.result, text)

    def _follow_policy(self) -> None:
        """Follow what the policy file holds, if that is another policy and a valid one."""
        try:
            changes = self.file.changed()
        except ConfigError as error:
            self._note(f"the policy stays as it was: {error}", logging.ERROR)
            return
        if changes:
            self._core.follow(self.file.policy, self.file.earlier)
            self._note(f"another policy is followed: {'; '.join(changes)}")

    async def _statuses(self) -> Sequence[admin.ClusterStatus] | None:
        """Return what all routers report; None where one of them does not answer in time."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._target.statuses()
        except (OSError, grpc.aio.AioRpcError) as error:
            self._warn(f"a router does not report: {_in_words(error)}")
            return None

    def _observe(self, listed: Sequence[Listed], statuses: Sequence[admin.ClusterStatus] | None) -> Observation:
        at_s, unix_s = self._clock.now_s(), time.time()
        try:
            found = self._observer.observe(at_s, unix_s, listed, statuses)
        except ProtocolError as error:
            self._warn(f"a router counts otherwise: {error}")
            return self._observer.observe(at_s, unix_s, listed, None)
        if statuses is not None:
            self._warning = ""
        return found

    async def _order(self, action: Action) -> None:
        try:
            match action:
                case Add(name, role):
                    await self._actuator.add(name, role)
                case Drain(name):
                    await self._actuator.drain(name)
                case Flip(name, role):
                    await self._actuator.flip(name, role)
        except ActuatorError as error:
            self._core.failed(action, str(error), self._clock.now_s())
        else:
            self._core.ordered(action, self._clock.now_s())

    def _warn(self, text: str) -> None:
        """Note an error once, however long it lasts."""
        if text != self._warning:
            self._warning = text
            self._note(text, logging.WARNING)

    def _note(self, text: str, level: int = logging.INFO) -> None:
        logger.log(level, "%s", text)
        self._journal.note(text)
        self._noted.append(text)


def _in_words(error: OSError | grpc.aio.AioRpcError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {STATUS_TIMEOUT_S:g} s"
    if isinstance(error, OSError):
        return str(error)
    return f"{error.code().name}: {error.details()}"


async def _reported(router: AdminClient, decisions: Sequence[str]) -> None:
    with suppress(OSError, grpc.aio.AioRpcError):
        await router.report_decisions(decisions)
