"""Workers that change roles: what a router places on them, and how an operator's wish reaches them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from goodput_cluster import Cluster, placed
from router_driver import LAYOUT, Driver
from router_fakes import FakeWorker, RouterUnderTest

from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.base.roles import Role
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.link import layout_to_proto
from pdserve.protocol.reports import ReportedLoad
from pdserve.router import admin as endpoint
from pdserve.router.placement.policies import POLICIES
from pdserve.router.requests.commands import DropLink
from pdserve.router.requests.events import LinkId, LoadReported, RoleAsked

StartRouter = Callable[..., Awaitable[RouterUnderTest]]


def hear(driver: Driver, worker: LinkId, role: Role, epoch: int) -> None:
    driver.post(LoadReported(worker, ReportedLoad(100, role=role, role_epoch=epoch)))


def role_of(driver: Driver, worker: LinkId) -> Role:
    return driver.core.workers.known(worker).role


# ---- what workers report


@pytest.mark.parametrize("again", ["with its load", "by registering"])
def test_a_request_held_for_want_of_a_prefill_worker_goes_to_one_that_becomes_one(again: str) -> None:
    driver = Driver()
    first, _ = driver.attach("d0"), driver.attach("d1")
    driver.arrive()
    assert not driver.placements()
    if again == "with its load":
        hear(driver, first, Role.PREFILL, 1)
    else:
        driver.attach_again(first, role=Role.PREFILL, role_epoch=1)
    place = driver.placed()
    assert place.prefill is not None
    assert (place.prefill.link, role_of(driver, first)) == (first, Role.PREFILL)


def test_a_role_of_no_greater_epoch_changes_nothing() -> None:
    driver = Driver()
    worker = driver.attach("d0", role_epoch=3)
    hear(driver, worker, Role.PREFILL, 3)
    assert role_of(driver, worker) is Role.DECODE


def test_a_worker_that_registers_again_under_another_role_of_the_same_epoch_is_dropped() -> None:
    driver = Driver()
    worker = driver.attach("d0", role_epoch=3)
    driver.attach_again(worker, role=Role.PREFILL, role_epoch=3)
    (drop,) = [command for command in driver.last if isinstance(command, DropLink)]
    assert "role prefill, was decode" in drop.reason


def test_what_a_worker_was_given_before_it_changed_goes_on() -> None:
    driver = Driver()
    prefill, decode = driver.pair()
    request = driver.arrive(max_tokens=2)
    hear(driver, decode, Role.PREFILL, 1)
    hear(driver, prefill, Role.DECODE, 1)
    driver.tokens(prefill, request, 0, 7)
    driver.tokens(decode, request, 1, 8, end=1)
    assert driver.delivered[request, 0] == [7, 8]
    driver.answer(request)


# ---- mixed workers


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_single_mixed_worker_serves_alone_and_hands_nothing_to_itself(policy: str) -> None:
    cluster = Cluster(policy, workers="m0")
    assert not any(cluster.core.membership.unroutable().values())
    for _ in range(5):
        place = placed(cluster.arrive(500))
        assert place.prefill is None
        assert place.decode is not None


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("workers", ["m0 m1", "p0 m0", "m0 d0", "p0 m0 d0"])
def test_no_worker_is_both_ends_of_a_hand_off(policy: str, workers: str) -> None:
    cluster = Cluster(policy, workers=workers)
    for _ in range(30):
        place = placed(cluster.arrive(300, max_tokens=10))
        assert place.decode is not None
        assert place.prefill is not place.decode
        assert place.prefill is not None or place.decode.role is Role.MIXED, "the others were not to compute prompts"


def test_mixed_workers_share_what_comes() -> None:
    cluster = Cluster(workers="m0 m1")
    used = {placed(cluster.arrive(300)).decode.worker_id for _ in range(20)}  # type: ignore[union-attr]
    assert used == {"m0", "m1"}


# ---- an operator's wish


def test_a_role_is_sent_to_the_worker_alone_and_believed_once_it_reports_it() -> None:
    driver = Driver()
    _, decode = driver.pair()
    assert driver.post(RoleAsked(decode, Role.MIXED, 1)) == [RoleAsked(decode, Role.MIXED, 1)]
    assert role_of(driver, decode) is Role.DECODE
    assert driver.post(RoleAsked(LinkId(99), Role.MIXED, 1)) == []


async def ask(router: RouterUnderTest, worker: str, role: "link.Role.ValueType", *, force: bool = False) -> int:
    request = admin.SetWorkerRoleRequest(worker_id=worker, role=role, force=force)
    reply = await router.admin.SetWorkerRole(request, metadata=await router.proof("SetWorkerRole"))
    return int(reply.epoch)


async def take(worker: FakeWorker, role: "link.Role.ValueType", epoch: int) -> None:
    """Report a role as a worker does that has taken it."""
    worker.registration.role, worker.registration.role_epoch = role, epoch
    await worker.say(register=worker.registration)


async def refused(router: RouterUnderTest, worker: str, role: "link.Role.ValueType") -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(router, worker, role)
    return refusal.value.code(), refusal.value.details() or ""


async def test_the_call_is_answered_once_the_worker_has_taken_the_role(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    call = asyncio.create_task(ask(router, "d0", link.ROLE_MIXED))
    await decode.until(lambda: bool(decode.roles))
    assert not call.done()
    assert [(each.role, each.epoch) for each in decode.roles] == [(link.ROLE_MIXED, 1)]
    await take(decode, link.ROLE_MIXED, 1)
    assert await call == 1
    assert await ask(router, "d0", link.ROLE_MIXED) == 1, "it has this role already"
    assert len(decode.roles) == 1


async def test_of_two_routers_at_once_the_one_that_the_worker_does_not_follow_names_the_role_that_won(
    start_router: StartRouter,
) -> None:
    router = await start_router()
    _, decode = await router.pair()
    await router.worker(link.ROLE_DECODE, "d1")
    call = asyncio.create_task(refused(router, "d0", link.ROLE_PREFILL))
    await decode.until(lambda: bool(decode.roles))
    await take(decode, link.ROLE_MIXED, 1)
    code, text = await call
    assert code is grpc.StatusCode.ABORTED
    assert text == "d0 was given another role at the same time: mixed, epoch 1"


async def test_what_cannot_be_is_refused_and_nobody_is_asked(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    await router.worker(link.ROLE_DECODE, "small", num_pages=200)
    await router.worker(link.ROLE_DECODE, "loading", ready=False)
    await router.worker(link.ROLE_DECODE, "old", protocol_version=PROTOCOL_VERSION - 1)
    other_layout = layout_to_proto(replace(LAYOUT, page_size=32))
    await router.worker(link.ROLE_PREFILL, "other", layout=other_layout)
    invalid, precondition = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
    assert await refused(router, "x", link.ROLE_MIXED) == (
        grpc.StatusCode.NOT_FOUND,
        "worker_id: 'x' is not attached",
    )
    assert await refused(router, "d0", link.ROLE_UNSPECIFIED) == (invalid, "role: 0 is unknown")
    code, text = await refused(router, "small", link.ROLE_MIXED)
    assert (code, "200 pages are less than two of the longest sequences need, 256" in text) == (precondition, True)
    assert await refused(router, "loading", link.ROLE_MIXED) == (precondition, "loading takes nothing: it is loading")
    assert await refused(router, "old", link.ROLE_MIXED) == (
        precondition,
        f"old takes nothing: protocol_version: {PROTOCOL_VERSION - 1} != {PROTOCOL_VERSION}",
    )
    assert await refused(router, "p0", link.ROLE_DECODE) == (
        precondition,
        "p0 is the only worker that computes prompts: make it mixed, or force this",
    )
    assert not prefill.roles
    assert not decode.roles
    forced = asyncio.create_task(ask(router, "p0", link.ROLE_DECODE, force=True))
    await prefill.until(lambda: bool(prefill.roles))
    await take(prefill, link.ROLE_DECODE, 1)
    assert await forced == 1


async def test_a_worker_that_does_not_take_the_role_in_time_is_named(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 0.2)
    router = await start_router()
    await router.pair()
    code, text = await refused(router, "d0", link.ROLE_MIXED)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert text == "d0 has not become a mixed worker within 0.2 s; it may yet"


async def test_a_role_that_a_worker_has_yet_to_take_can_be_taken_back(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 0.2)
    router = await start_router()
    _, decode = await router.pair()
    await refused(router, "d0", link.ROLE_MIXED)
    monkeypatch.setattr(endpoint, "ASKED_TIMEOUT_S", 5.0)
    call = asyncio.create_task(ask(router, "d0", link.ROLE_DECODE))
    await decode.until(lambda: len(decode.roles) == 2)
    assert [(each.role, each.epoch) for each in decode.roles] == [(link.ROLE_MIXED, 1), (link.ROLE_DECODE, 2)]
    await take(decode, link.ROLE_DECODE, 2)
    assert await call == 2


async def test_of_two_workers_that_are_to_leave_a_pool_at_once_the_last_is_refused(start_router: StartRouter) -> None:
    router = await start_router()
    _, first = await router.pair()
    await router.worker(link.ROLE_DECODE, "d1")
    call = asyncio.create_task(ask(router, "d0", link.ROLE_PREFILL))
    await first.until(lambda: bool(first.roles))
    code, text = await refused(router, "d1", link.ROLE_PREFILL)
    assert (code, text) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "d1 is the only worker that decodes: make it mixed, or force this",
    )
    await take(first, link.ROLE_PREFILL, 1)
    assert await call == 1


async def test_a_worker_that_leaves_meanwhile_ends_the_call(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    call = asyncio.create_task(refused(router, "d0", link.ROLE_MIXED))
    await decode.until(lambda: bool(decode.roles))
    await decode.die()
    assert await call == (grpc.StatusCode.UNAVAILABLE, "d0 is no longer attached")


def test_prompts_that_wait_on_a_mixed_worker_count_where_it_serves_alone() -> None:
    d = Driver()
    d.attach("m0", layout=replace(LAYOUT, page_size=32))
    d.arrive(prompt=range(800))
    idle = d.attach("m1")
    first = d.arrive()
    d.tokens(idle, first, 0, 5)
    second = d.arrive()
    reason = d.core.placements.requests[second].ledger.decision
    assert reason.startswith("least loaded: m1 has 0 prompt tokens waiting, m1 1 sequences")
