"""Two frontends are one router to tenants, gateways and operators."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from frontend_owners import own_ports, owner
from looking import until
from router_fakes import MODEL, TOKENIZER, RouterUnderTest, StartRouter, model_folder, text_of, tokens_of
from scraping import scrape, snapshot
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.launch.authority import Authority
from pdserve.launch.folder import free_port
from pdserve.measure.live import serving_process
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.router.frontend.clients import new_key

START_S = 120.0  # for two processes to start on a busy machine
NUM_OF_EACH = 8  # connections, so that each frontend has some

pytestmark = pytest.mark.slow
StartBoth = Callable[..., Awaitable["TwoFrontends"]]


class Side:
    """A connection to one of the frontends, on which one tenant speaks."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self.channel = channel
        self._metadata = (("authorization", f"Bearer {key}"),)

    def generate(self, max_tokens: int) -> grpc.aio.UnaryStreamCall:
        sampling = inference.SamplingParams(max_tokens=max_tokens)
        request = inference.GenerateRequest(text="hello", sampling=sampling)
        return InferenceServiceStub(self.channel).Generate(request, metadata=self._metadata, timeout=20)

    def named(self, name: str) -> grpc.aio.UnaryStreamCall:
        asked = vllm.GenerateRequest(request_id=name, text="hello", sampling_params=vllm.SamplingParams(max_tokens=2))
        return VllmEngineStub(self.channel).Generate(asked, metadata=self._metadata, timeout=20)

    async def abort(self, name: str) -> None:
        await VllmEngineStub(self.channel).Abort(vllm.AbortRequest(request_ids=[name]), metadata=self._metadata)


@dataclass
class TwoFrontends:
    """A router that serves no clients itself, and two frontends on the same ports."""

    router: RouterUnderTest
    public: str  # host:port
    http: str
    processes: list[Process]


@pytest.fixture
async def start_both(
    start_router: StartRouter, secret_file: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[TwoFrontends]]]:
    """Start a router and two frontends, with settings of the frontends."""
    model = model_folder(tmp_path)
    async with AsyncExitStack() as stack:

        async def start(**settings: object) -> TwoFrontends:
            router = await start_router(serve_clients=False, served_model_name=MODEL)
            port, http_port = free_port("127.0.0.1"), free_port("127.0.0.1")
            flags = {
                "model": model, "served_model_name": MODEL, "secret_file": secret_file, "port": port,
                "http_port": http_port, "routers": (router.addresses.internal,), "shares_ports": True, **settings,
            }  # fmt: skip
            processes = [await stack.enter_async_context(serving_process("frontend", flags)) for _ in range(2)]
            await router.until_status(lambda status: len(status.frontends) == 2, START_S)
            return TwoFrontends(router, f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", processes)

        yield start


@asynccontextmanager
async def both_sides(address: str, key: str) -> AsyncIterator[list[Side]]:
    """Connect until both frontends are reached."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    sides: dict[int, Side] = {}
    async with AsyncExitStack() as stack:
        while len(sides) < 2:
            before = own_ports(address)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            await channel.channel_ready()
            (port,) = own_ports(address) - before
            sides.setdefault(await asyncio.to_thread(owner, os.getpid(), port), Side(channel, key))
        yield list(sides.values())


async def test_two_frontends_are_one_router(start_both: StartBoth, tmp_path: Path) -> None:
    key, digest = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"tenants: {{acme: {{keys: [{{id: web, sha256: {digest}}}], max_concurrent: 2}}}}")
    keys.chmod(0o600)
    both = await start_both(api_keys_file=keys, router_grace_s=1)
    router = both.router
    prefill, _ = await router.pair()
    async with both_sides(both.public, key) as (one, other):
        for side in (one, other):
            replies = [reply async for reply in side.generate(5)]
            assert text_of(replies) == TOKENIZER.decode(tokens_of(TOKENIZER.encode("hello", add_special=False), 5))
            assert replies[-1].usage.completion_tokens == 5

        prefill.is_paused = True
        running = [side.generate(1) for side in (one, other)]
        await prefill.until(lambda: len(prefill.prefills) == 4)
        with pytest.raises(grpc.aio.AioRpcError, match="max_concurrent: 2 requests of this tenant") as refused:
            await other.generate(1).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in running:
            call.cancel()
        await prefill.until(lambda: len(prefill.cancels) == 2)
        await router.until_idle()

        named = one.named("r1")
        await prefill.until(lambda: len(prefill.prefills) == 5)
        await other.abort("r1")
        with pytest.raises(grpc.aio.AioRpcError, match="aborted"):
            await named.read()
        await router.until_idle()
        shown = await asyncio.to_thread(lambda: urlopen(f"http://{router.addresses.metrics}/metrics").read().decode())
        assert 'pdserve_requests_refused_total{cause="tenant_concurrency"} 1.0' in shown
        assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 2.0' in shown
        assert "pdserve_frontends 2.0" in shown

        last = one.generate(1)
        await prefill.until(lambda: len(prefill.prefills) == 6)
        router.stop.set()
        late = other.generate(1)
        await prefill.step([prefill.delta(prefill.prefills[5].spec, 0, 0, is_last=True)])
        assert len(text_of([reply async for reply in last])) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="router_grace_s: no router has been attached for 1 s"):
            await late.read()
        assert len(prefill.prefills) == 6, "a router that shuts down gets no more requests"


async def test_each_frontend_shows_the_live_page_of_the_router_and_is_lost_unless_it_says_that_it_ends(
    start_both: StartBoth,
) -> None:
    both = await start_both()
    await both.router.pair()
    async with grpc.aio.insecure_channel(both.public) as channel:
        sampling = inference.SamplingParams(max_tokens=2)
        request = inference.GenerateRequest(text="hello", sampling=sampling)
        assert [reply async for reply in InferenceServiceStub(channel).Generate(request)]
    await both.router.until_idle()
    page = f"{both.http}/page"
    for _ in range(NUM_OF_EACH):
        state = await asyncio.to_thread(snapshot, both.http)
        (ended,) = state["ended"].values()
        assert (set(state["workers"]), ended["completion_tokens"]) == ({"p0", "d0"}, 2)
        asked = f"{page}/requests/{ended['request_id']}"
        known = json.loads(await asyncio.to_thread(lambda asked=asked: urlopen(asked, timeout=10).read()))
        assert known["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
        assert known["ledger"]["steps"][0] == {"name": "received", "at_ms": 0.0}
        with pytest.raises(HTTPError, match="404"):
            await asyncio.to_thread(urlopen, f"{page}/requests/00", timeout=10)

    async def end(process: Process, number: signal.Signals, num_left: int) -> float:
        process.send_signal(number)
        await process.wait()
        await both.router.until_status(lambda status: len(status.frontends) == num_left, 10)
        return (await asyncio.to_thread(scrape, both.router.addresses.metrics)).value("pdserve_frontends_lost_total")

    stopped, killed = both.processes
    assert await end(stopped, signal.SIGTERM, 1) == 0
    assert await end(killed, signal.SIGKILL, 0) == 1


async def test_a_frontend_refuses_a_port_that_others_listen_on(
    start_router: StartRouter, secret_file: Path, tmp_path: Path
) -> None:
    first = await start_router()
    port = first.addresses.public.rpartition(":")[2]
    flags = {
        "model": model_folder(tmp_path), "secret_file": secret_file, "port": port,
        "routers": (first.addresses.internal,), "shares_ports": True,
    }  # fmt: skip
    async with serving_process("frontend", flags) as process:
        assert await process.wait() == 2


async def test_a_connection_that_any_frontend_refuses_is_counted_by_the_router(
    start_both: StartBoth, tmp_path: Path
) -> None:
    authority = Authority.new()
    authority.write_public(tmp_path / "tls", ("127.0.0.1",), timedelta(days=1))
    files = {"ssl_certfile": tmp_path / "tls" / "tls.crt", "ssl_keyfile": tmp_path / "tls" / "tls.key"}
    both = await start_both(**files)

    def counted() -> tuple[float, float]:
        found = scrape(both.router.addresses.metrics)
        names = ("pdserve_tls_connections_total", "pdserve_tls_connections_called_total")
        opened, called = (found.value(name, port="public") for name in names)
        return opened, called

    assert await asyncio.to_thread(counted) == (0, 0)
    believed, alone = grpc.ssl_channel_credentials(authority.pem), [("grpc.use_local_subchannel_pool", 1)]
    for _ in range(NUM_OF_EACH):
        async with grpc.aio.secure_channel(both.public, believed, options=alone) as channel:
            await InferenceServiceStub(channel).ListModels(inference.ListModelsRequest())
        async with grpc.aio.insecure_channel(both.public, options=alone) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await InferenceServiceStub(channel).ListModels(inference.ListModelsRequest())
    await asyncio.to_thread(until, lambda: counted()[1] == NUM_OF_EACH and counted()[0] >= 2 * NUM_OF_EACH)
