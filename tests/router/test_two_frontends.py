"""Two frontends are one router to tenants, gateways and operators, and end with it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import psutil
import pytest
from frontend_owners import frontends, own_ports, owner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from looking import until
from probing import health_flags, served
from router_fakes import MODEL, TOKENIZER, RouterUnderTest, StartRouter, collect, model_folder, text_of, tokens_of
from scraping import scrape, snapshot
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.errors import ConfigError
from pdserve.launch.authority import Authority
from pdserve.launch.folder import free_port
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.router.frontend.clients import new_key

# A frontend that begins once somebody has opened the pipe of its number, and closed it.
GATED = """
import sys
open(f"{sys.argv.pop(1)}/{sys.argv[2]}").read()
from pdserve.router.frontend.process import main
main()
"""
NUM_OF_EACH = 8  # connections, so that each frontend has some

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


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


@asynccontextmanager
async def both_sides(router: RouterUnderTest, key: str) -> AsyncIterator[list[Side]]:
    """Connect until both frontends are reached."""
    address, options = router.addresses.public, [("grpc.use_local_subchannel_pool", 1)]
    sides: dict[int, Side] = {}
    async with AsyncExitStack() as stack:
        while len(sides) < 2:
            before = own_ports(address)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            await channel.channel_ready()
            (port,) = own_ports(address) - before
            sides.setdefault(await asyncio.to_thread(owner, os.getpid(), port), Side(channel, key))
        yield list(sides.values())


async def test_two_frontends_are_one_router(start_router: StartRouter, model: Path, tmp_path: Path) -> None:
    key, digest = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"tenants: {{acme: {{keys: [{{id: web, sha256: {digest}}}], max_concurrent: 2}}}}")
    keys.chmod(0o600)
    served = {"model": str(model), "served_model_name": MODEL, "api_keys_file": keys, "num_frontends": 2}
    router = await start_router(**served)
    assert not any(map(shares_channel, frontends(os.getpid())))
    prefill, _ = await router.pair()
    async with both_sides(router, key) as (one, other):
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
        for side in (one, other):
            await not_serving(side)
        with pytest.raises(grpc.aio.AioRpcError, match="this router is shutting down"):
            await other.generate(1).read()
        await prefill.step([prefill.delta(prefill.prefills[5].spec, 0, 0, is_last=True)])
        assert len(text_of([reply async for reply in last])) == 1


def shares_channel(frontend: psutil.Process) -> bool:
    """Whether processes that a frontend starts have its channel."""
    flags = Path(f"/proc/{frontend.pid}/fdinfo/{frontend.cmdline()[-4]}").read_text().split()[3]
    return not int(flags, 8) & os.O_CLOEXEC


async def not_serving(side: Side) -> None:
    """Return once a frontend says that it does not serve."""
    async for state in health_pb2_grpc.HealthStub(side.channel).Watch(health_pb2.HealthCheckRequest()):
        if state.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            return


async def test_a_router_says_nothing_of_being_ready_until_the_doors_of_all_frontends_are_open(
    start_router: StartRouter, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [tmp_path / "0", tmp_path / "1"]
    for gate in gates:
        os.mkfifo(gate)
    monkeypatch.setattr("pdserve.router.frontend_processes.COMMAND", (sys.executable, "-P", "-c", GATED, str(tmp_path)))
    ports = {key: free_port("127.0.0.1") for key in ("port", "internal_port", "metrics_port")} | health_flags()

    def address(key: str) -> str:
        return f"127.0.0.1:{ports[key]}"

    async def open_doors() -> None:
        await asyncio.to_thread(gates[0].write_text, "")
        async with grpc.aio.insecure_channel(address("port")) as public:
            await public.channel_ready()
        async with grpc.aio.insecure_channel(address("internal_port")) as internal:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(internal.channel_ready(), 1)
        assert await asyncio.to_thread(served, ports["health_port"]) == ["live"]
        assert (await asyncio.to_thread(scrape, address("metrics_port"))).value("pdserve_frontends") == 1
        await asyncio.to_thread(gates[1].write_text, "")

    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(open_doors())
        router = await start_router(model=str(model), served_model_name=MODEL, num_frontends=2, **ports)
        assert opening.done()
    assert (await asyncio.to_thread(scrape, address("metrics_port"))).value("pdserve_frontends") == 2
    await router.pair()
    assert await asyncio.to_thread(served, ports["health_port"]) == ["live", "started", "ready"]


async def test_each_frontend_shows_the_live_page_of_the_router(start_router: StartRouter, model: Path) -> None:
    router = await start_router(model=str(model), served_model_name=MODEL, num_frontends=2, http_port=0)
    await router.pair()
    await collect(router.generate(text="hello", max_tokens=2))
    await router.until_idle()
    page = f"{router.addresses.http}/page"
    for _ in range(NUM_OF_EACH):
        state = await asyncio.to_thread(snapshot, router.addresses.http)
        (ended,) = state["ended"].values()
        assert (set(state["workers"]), ended["completion_tokens"]) == ({"p0", "d0"}, 2)
        asked = f"{page}/requests/{ended['request_id']}"
        known = json.loads(await asyncio.to_thread(lambda asked=asked: urlopen(asked, timeout=10).read()))
        assert known["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1}
        assert known["ledger"]["steps"][0] == {"name": "received", "at_ms": 0.0}
        with pytest.raises(HTTPError, match="404"):
            await asyncio.to_thread(urlopen, f"{page}/requests/00", timeout=10)


async def test_a_port_that_others_listen_on_is_refused_by_all_frontends_at_once(
    start_router: StartRouter, model: Path
) -> None:
    first = await start_router()
    port = int(first.addresses.public.rpartition(":")[2])
    with pytest.raises(ExceptionGroup) as refused:
        await start_router(model=str(model), served_model_name=MODEL, port=port, num_frontends=2)
    assert refused.group_contains(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}")
    assert not frontends(os.getpid())


async def test_a_connection_that_any_frontend_refuses_is_counted_by_the_router(
    start_router: StartRouter, model: Path, tmp_path: Path
) -> None:
    authority = Authority.new()
    authority.write_public(tmp_path / "tls", ("127.0.0.1",), timedelta(days=1))
    files = {"ssl_certfile": tmp_path / "tls" / "tls.crt", "ssl_keyfile": tmp_path / "tls" / "tls.key"}
    router = await start_router(model=str(model), served_model_name=MODEL, num_frontends=2, **files)

    def counted() -> tuple[float, float]:
        found = scrape(router.addresses.metrics)
        names = ("pdserve_tls_connections_total", "pdserve_tls_connections_called_total")
        opened, called = (found.value(name, port="public") for name in names)
        return opened, called

    assert await asyncio.to_thread(counted) == (0, 0)
    believed, alone = grpc.ssl_channel_credentials(authority.pem), [("grpc.use_local_subchannel_pool", 1)]
    for _ in range(NUM_OF_EACH):
        async with grpc.aio.secure_channel(router.addresses.public, believed, options=alone) as channel:
            await InferenceServiceStub(channel).ListModels(inference.ListModelsRequest())
        async with grpc.aio.insecure_channel(router.addresses.public, options=alone) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await InferenceServiceStub(channel).ListModels(inference.ListModelsRequest())
    await asyncio.to_thread(until, lambda: counted()[1] == NUM_OF_EACH and counted()[0] >= 2 * NUM_OF_EACH)
