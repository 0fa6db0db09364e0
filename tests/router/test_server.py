"""The router process: who may call it, what it says of its health, how it stops."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_driver import Driver
from router_fakes import RouterUnderTest, StartRouter, collect, error_of, token_ids_of, tokens_in, tokens_of

from pdserve.base.errors import ConfigError
from pdserve.base.signals import CLOSING_S
from pdserve.net.rpc import (
    HELLO_METADATA_KEY,
    LAST_WORDS_S,
    PROOF_METADATA_KEY,
    Caller,
    check_bind,
    identify,
    read_secret,
)
from pdserve.observe import tracing
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.endpoints import HAS_VLLM, OPEN_INFERENCE, VLLM_ENGINE
from pdserve.router.local_backend import LocalBackend
from pdserve.router.requests.events import LinkLost
from pdserve.router.shell import Shell
from pdserve.settings.config import load_config

SERVICE = "pdserve.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HEALTH_SERVICES = ("live", "started", "ready", "")
NUM_SERVERS = 3  # the public one, the internal one, health
INTERNAL_METHODS = ("LinkService/Attach", "AdminService/GetStatus", "AdminService/WatchStatus", "NoService/Nothing")


async def test_health_follows_the_workers_and_ends_first(start_router: StartRouter) -> None:
    router = await start_router()
    health = health_pb2_grpc.HealthStub(router.public)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == NOT_SERVING
    assert await serves(router) == ["live", "started"]
    prefill, decode = await router.pair()
    assert (await watch.read()).status == SERVING
    assert await serves(router) == ["live", "started", "ready", ""]
    await decode.die()
    assert (await watch.read()).status == NOT_SERVING
    assert await serves(router) == ["live", "started", "ready", ""], "requests wait for another"
    await router.worker(link.ROLE_DECODE, "d1")
    assert (await watch.read()).status == SERVING
    prefill.is_paused = True
    call = router.generate(text="hello", max_tokens=1)
    await prefill.until(lambda: bool(prefill.prefills))
    assert await serves(router) == ["live", "started", "ready", ""]
    router.stop.set()
    assert await serves(router) == ["live", "started"]
    assert (await watch.read()).status == NOT_SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    call.cancel()


def test_a_drain_that_ends_in_time_leaves_time_to_close_everything() -> None:
    assert 2 * LAST_WORDS_S + tracing.CLOSE_TIMEOUT_S < CLOSING_S


class HandClock:
    """A clock that stands until it is set."""

    at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


async def test_a_router_that_lost_its_workers_is_ready_for_as_long_as_requests_wait_for_others() -> None:
    driver, clock = Driver(), HandClock()
    config = RouterConfig(model="m", secret_file=Path("secret"), pool_grace_s=30.0)
    backend = LocalBackend(Shell(driver.core, clock), config, "m", lambda: False)
    assert not backend.readiness().is_ready, "none has come yet"
    prefill, _ = driver.pair()
    assert backend.readiness().is_ready
    driver.post(LinkLost(prefill, "it crashed"))
    assert not driver.core.is_ready
    clock.at_s = 29.0
    assert backend.readiness().is_ready
    clock.at_s = 31.0
    assert not backend.readiness().is_ready


async def serves(router: RouterUnderTest) -> list[str]:
    """Return the services of the health port that are SERVING; nothing else is served there."""
    async with grpc.aio.insecure_channel(router.addresses.health) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        asked = {name: health.Check(health_pb2.HealthCheckRequest(service=name)) for name in HEALTH_SERVICES}
        return [name for name, reply in asked.items() if (await reply).status == SERVING]


async def test_shutdown_lets_running_requests_finish_and_takes_no_others(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    prefill.is_paused = True
    running = router.generate(text="a", max_tokens=1)
    await prefill.until(lambda: bool(prefill.prefills))
    router.stop.set()
    code, message = await refusal_at_shutdown(router)
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "this router is shutting down")
    spec = prefill.prefills[0].spec
    await prefill.step([prefill.delta(spec, 0, 0, is_last=True)])
    assert tokens_in(await collect(running)) == tokens_of(token_ids_of(spec), 1)
    del decode


async def refusal_at_shutdown(router: RouterUnderTest) -> tuple[grpc.StatusCode, str]:
    health = health_pb2_grpc.HealthStub(router.public)
    async for state in health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
        if state.status == NOT_SERVING:
            break
    return await error_of(router.generate(text="b"))


async def test_no_server_is_stopped_twice_at_once(start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: Counter[int] = Counter()  # by server; in a second stop at once, gRPC may crash
    over = asyncio.Event()
    servers = type(grpc.aio.server())
    stop = servers.stop

    async def counted(server: grpc.aio.Server, grace: float | None) -> None:
        stops[id(server)] += 1
        await stop(server, grace)
        if len(stops) == NUM_SERVERS:
            over.set()

    monkeypatch.setattr(servers, "stop", counted)
    router = await start_router()
    await router.pair()
    router.stop.set()
    async with asyncio.timeout(10 * LAST_WORDS_S):
        await over.wait()
    assert set(stops.values()) == {1}


async def test_shutdown_ends_what_does_not_finish_in_time(start_router: StartRouter) -> None:
    router = await start_router(drain_timeout_s=0.1)
    prefill, _ = await router.pair()
    prefill.is_paused = True
    stuck = router.generate(text="a")
    await prefill.until(lambda: bool(prefill.prefills))
    router.stop.set()
    code, message = await error_of(stuck)
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "this router is shutting down")


@pytest.mark.parametrize("key", [HELLO_METADATA_KEY, PROOF_METADATA_KEY, "pdserve-secret-bin"])
@pytest.mark.parametrize("value", [None, b"", b"x" * 152, "the secret", "a hello", "a proof for another method"])
@pytest.mark.parametrize("method", INTERNAL_METHODS)
async def test_nothing_internal_is_answered_without_proof_of_the_secret(
    start_router: StartRouter, method: str, key: str, value: bytes | str | None
) -> None:
    router = await start_router()
    shown = value
    if value == "the secret":
        shown = router.secret
    elif value == "a hello":
        ((_, shown),) = Caller(router.secret).hello
    elif value == "a proof for another method":
        ((_, shown),) = await identify(router.internal, router.secret, "/pdserve.v1.AdminService/Other")
    metadata = ((key, shown),) if isinstance(shown, bytes) else ()
    call = router.internal.stream_stream(f"/pdserve.v1.{method}")(metadata=metadata)
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_operators_are_not_served_on_the_public_port(start_router: StartRouter) -> None:
    router = await start_router()
    for method in ("AdminService/GetStatus", "LinkService/Attach"):
        proof = await identify(router.internal, router.secret, f"/pdserve.v1.{method}")
        call = router.public.stream_stream(f"/pdserve.v1.{method}")(metadata=proof)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_names_the_public_services(start_router: StartRouter) -> None:
    router = await start_router()
    stub = reflection_pb2_grpc.ServerReflectionStub(router.public)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    dialects = (OPEN_INFERENCE, *((VLLM_ENGINE,) if HAS_VLLM else ()))
    assert names == {SERVICE, *dialects, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    call.cancel()


async def test_watching_tells_of_changes(start_router: StartRouter) -> None:
    router = await start_router()
    watch = router.admin.WatchStatus(admin.WatchStatusRequest(), metadata=await router.proof("WatchStatus"))
    assert len((await watch.read()).status.workers) == 0
    await router.worker(link.ROLE_PREFILL, "p0")
    async with asyncio.timeout(5):
        while not (await watch.read()).status.workers:
            pass
    watch.cancel()


async def test_a_slow_watch_tells_at_once_of_workers_and_of_nothing_else(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    slow = admin.WatchStatusRequest(min_interval_ms=3_600_000)
    watch = router.admin.WatchStatus(slow, metadata=await router.proof("WatchStatus"))
    assert len((await watch.read()).status.workers) == 2
    other = router.admin.WatchStatus(admin.WatchStatusRequest(), metadata=await router.proof("WatchStatus"))
    for _ in range(4):  # as workers report their load
        await other.read()
    async with asyncio.timeout(5):
        await router.worker(link.ROLE_DECODE, "d1")
        assert len((await watch.read()).status.workers) == 3
    other.cancel()
    watch.cancel()


async def test_a_port_in_use_is_the_operators_error(start_router: StartRouter) -> None:
    router = await start_router()
    port = int(router.addresses.public.rpartition(":")[2])
    with pytest.raises(ExceptionGroup) as caught:
        await start_router(port=port)
    assert caught.group_contains(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}")


def test_the_router_never_imports_torch() -> None:
    code = (
        "import sys, pdserve.router.server; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_secret_has_to_be_private_and_long(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="secret_file: cannot read"):
        read_secret(path)
    path.write_bytes(b"x" * 32 + b"\n")
    for exposed in (0o644, 0o604, 0o602, 0o660, 0o620):
        path.chmod(exposed)
        with pytest.raises(ConfigError, match=f"secret_file: .* mode {exposed:04o}"):
            read_secret(path)
    for private in (0o600, 0o400, 0o440, 0o640):
        path.chmod(private)
        assert read_secret(path) == b"x" * 32
    path.chmod(0o600)
    path.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match=r"secret_file: .* 31 bytes"):
        read_secret(path)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:80", "::1", "[::1]:80", "localhost:80", "127.9.9.9"])
def test_listening_on_loopback_needs_no_identity(address: str) -> None:
    check_bind(address, has_identity=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "0.0.0.0:80", "::", "[::]:80", "10.0.0.1", "example.org", ""])
def test_listening_elsewhere_needs_identity(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host: .* reachable"):
        check_bind(address, has_identity=False)
    check_bind(address, has_identity=True)


def test_unknown_keys_and_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_request"):
        load_config(RouterConfig, None, {"model": "m", "secret_file": "s", "max_num_request": 3})
    with pytest.raises(ConfigError, match="placement"):
        load_config(RouterConfig, None, {"model": "m", "secret_file": "s", "placement": "best"})
