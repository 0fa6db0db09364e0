"""The public port serves clients with a key, by TLS where it has a certificate, as much as their tenant may ask for."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from operator import ge
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from router_fakes import RouterUnderTest, collect, error_of, running_router

from pdserve.base.errors import ConfigError
from pdserve.launch.authority import Authority
from pdserve.net.certificates import Part
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.router.frontend.clients import new_key

DAY = timedelta(days=1)
NUM_CLIENTS = 6
OK, UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass
class Keys:
    """A file of keys, and the keys themselves."""

    path: Path
    tenants: dict[str, dict[str, object]]

    def add(self, tenant: str, **limits: object) -> str:
        """Give a tenant limits and one more key; return the key."""
        key, digest = new_key()
        entry = self.tenants.setdefault(tenant, {"keys": []}) | limits
        entry["keys"] = [*entry["keys"], {"id": f"{tenant}-key", "sha256": digest}]  # type: ignore[misc]
        self.tenants[tenant] = entry
        self.write()
        return key

    def write(self) -> None:
        scratch = self.path.with_name("scratch")
        scratch.touch(mode=0o600)
        scratch.write_text(yaml.safe_dump({"tenants": self.tenants}))
        scratch.replace(self.path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.yaml", {})


@dataclass
class Public:
    """A router whose public port asks for keys over TLS, with workers."""

    router: RouterUnderTest
    authority: Authority

    @asynccontextmanager
    async def client(self, **shown: bytes) -> AsyncIterator[grpc.aio.Channel]:
        credentials = grpc.ssl_channel_credentials(**{"root_certificates": self.authority.pem, **shown})
        async with grpc.aio.secure_channel(self.router.addresses.public, credentials) as channel:
            yield channel

    async def ask(self, key: str | None, **fields: object) -> tuple[grpc.StatusCode, str, Mapping[str, str]]:
        """Return how a request ends: status, message and trailing metadata."""
        async with self.client() as channel:
            try:
                await collect(generate(channel, key, **fields))
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or "", dict(error.trailing_metadata())
        return OK, "", {}


def generate(channel: grpc.aio.Channel, key: str | None, **fields: object) -> grpc.aio.UnaryStreamCall:
    request = inference.GenerateRequest(text="a", sampling=inference.SamplingParams(max_tokens=1), **fields)
    return InferenceServiceStub(channel).Generate(request, metadata=bearer(key), timeout=10)


def bearer(key: str | None) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", f"Bearer {key}"),)


@pytest.fixture
async def public(tmp_path: Path, secret_file: Path, authority: Authority, keys: Keys) -> AsyncIterator[Public]:
    authority.write_public(tmp_path / "tls", ("127.0.0.1",), DAY)
    keys.write()
    settings: dict[str, object] = {
        "ssl_certfile": tmp_path / "tls" / "tls.crt",
        "ssl_keyfile": tmp_path / "tls" / "tls.key",
        "api_keys_file": keys.path,
    }
    async with running_router(secret_file, settings) as router:
        await router.pair()
        yield Public(router, authority)


async def scraped(router: RouterUnderTest, metric: str) -> str:
    host, port = router.addresses.metrics.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    shown = (await reader.read()).decode()
    writer.close()
    return next(line.rpartition(" ")[2] for line in shown.splitlines() if line.startswith(metric))


async def test_each_denial_has_its_reason_and_is_counted(public: Public, keys: Keys) -> None:
    good = keys.add("acme")
    wrong = [new_key()[0], good[:-1], good + "x", good.upper(), "", "x" * 5000]
    answer = (UNAUTHENTICATED, "no API key is shown: authorization: Bearer KEY", {"refused-because": "no_key"})
    assert await public.ask(None) == answer
    for key in wrong:
        assert (await public.ask(key))[:2] == (UNAUTHENTICATED, "the API key is not known here")
    assert (await public.ask(good))[0] is OK
    denied = 'pdserve_calls_denied_total{reason="'
    assert await scraped(public.router, f'{denied}no_key"') == "1.0"
    assert await scraped(public.router, f'{denied}wrong_key"') == f"{len(wrong)}.0"


async def test_every_method_but_health_needs_a_key_known_or_not(public: Public, keys: Keys) -> None:
    keys.add("acme")
    methods = ("pdserve.v1.InferenceService/Generate", "pdserve.v1.InferenceService/ListModels", "a.B/C", "")
    reflection = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    admin = "pdserve.v1.AdminService/GetStatus"
    async with public.client() as channel:
        for method in (*methods, reflection, admin, "grpc.health.v1.HealthX/Check"):
            call = channel.stream_stream(f"/{method}")()
            assert await call.code() is UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def num_without_call(public: Public) -> float:
    """Return of how many connections to the public port no call has come."""
    opened = await scraped(public.router, 'pdserve_tls_connections_total{port="public"')
    return float(opened) - float(await scraped(public.router, 'pdserve_tls_connections_called_total{port="public"'))


async def test_plaintext_and_foreign_authorities_reach_nothing_and_are_counted(public: Public, keys: Keys) -> None:
    key = keys.add("acme")
    assert await num_without_call(public) == 0
    async with grpc.aio.insecure_channel(public.router.addresses.public) as channel:
        assert (await error_of(generate(channel, key)))[0] is UNAVAILABLE
    plain = await num_without_call(public)
    async with public.client(root_certificates=Authority.new().pem) as channel:
        assert (await error_of(generate(channel, key)))[0] is UNAVAILABLE
    refused = await num_without_call(public)
    assert 0 < plain < refused
    assert (await public.ask(key))[0] is OK
    assert (await public.ask(None))[0] is UNAUTHENTICATED
    async with public.client() as channel:
        stub = ServerReflectionStub(channel)
        asked = stub.ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]), metadata=bearer(key))
        assert [reply.list_services_response.service[0].name async for reply in asked]
    assert await num_without_call(public) == refused


async def test_a_workers_certificate_stands_for_no_key(public: Public, tmp_path: Path) -> None:
    public.authority.write_identity(tmp_path / "worker", Part.WORKER, "c", DAY)
    certificate, key = ((tmp_path / "worker" / name).read_bytes() for name in ("tls.crt", "tls.key"))
    async with public.client(private_key=key, certificate_chain=certificate) as channel:
        assert (await error_of(generate(channel, None)))[0] is UNAUTHENTICATED


async def test_the_key_says_whose_a_request_is_and_how_urgent_it_may_be(public: Public, keys: Keys) -> None:
    key = keys.add("acme", max_priority=5)
    prefill = public.router.workers["p0"]
    assert (await public.ask(key))[0] is OK
    assert (await public.ask(key, tenant="acme", priority=99))[0] is OK
    assert (await public.ask(key, priority=-3))[0] is OK
    assert [each.spec.priority for each in prefill.prefills] == [0, 5, -3]
    salts = {each.spec.cache_salt for each in prefill.prefills}
    code, text, _ = await public.ask(key, tenant="other")
    assert (code, text) == (INVALID, "tenant: 'other' is not the tenant of this API key, 'acme' is")
    other = keys.add("other")
    assert (await public.ask(other))[0] is OK
    assert len(salts) == 1
    assert prefill.prefills[-1].spec.cache_salt not in salts


async def test_a_tenant_beyond_its_limits_is_refused_and_nobody_else_is(public: Public, keys: Keys) -> None:
    busy = keys.add("busy", requests_per_s=0.01, burst=2)
    other = keys.add("other")
    codes = [(await public.ask(busy))[0] for _ in range(2)]
    code, text, hints = await public.ask(busy)
    assert (codes, code) == ([OK, OK], EXHAUSTED)
    assert text == "requests_per_s: this tenant may send 0.01 requests a second"
    assert 90_000 < int(hints["retry-after-ms"]) <= 100_000
    assert hints["refused-because"] == "tenant_requests"
    assert (await public.ask(other))[0] is OK
    assert await scraped(public.router, 'pdserve_requests_refused_total{cause="tenant_requests"}') == "1.0"
    second = keys.add("busy")
    assert (await public.ask(second))[0] is EXHAUSTED  # one limit for all keys of a tenant


async def test_requests_under_way_are_limited_and_given_back(public: Public, keys: Keys) -> None:
    key = keys.add("acme", max_concurrent=1)
    prefill = public.router.workers["p0"]
    prefill.is_paused = True
    async with public.client() as channel:
        held = generate(channel, key)
        await prefill.until(lambda: bool(prefill.prefills))
        code, text, hints = await public.ask(key)
        assert (code, hints["refused-because"]) == (EXHAUSTED, "tenant_concurrency")
        assert text.startswith("max_concurrent: 1 requests")
        assert int(hints["retry-after-ms"]) > 0
        held.cancel()
        await public.router.until_idle()
    prefill.is_paused = False
    assert (await public.ask(key, tenant="x"))[0] is INVALID
    assert (await public.ask(key))[0] is OK


async def test_tokens_are_charged_when_they_are_known(public: Public, keys: Keys) -> None:
    key = keys.add("acme", tokens_per_s=0.01)
    assert (await public.ask(key))[0] is OK
    code, _, hints = await public.ask(key)
    assert (code, hints["refused-because"]) == (EXHAUSTED, "tenant_tokens")


async def test_keys_are_rotated_under_running_streams(public: Public, keys: Keys) -> None:
    first = keys.add("acme")
    prefill = public.router.workers["p0"]
    prefill.is_paused = True
    async with public.client() as channel:
        running = generate(channel, first)
        await prefill.until(lambda: bool(prefill.prefills))
        del keys.tenants["acme"]
        second = keys.add("acme")
        assert (await public.ask(first))[0] is UNAUTHENTICATED
        keys.path.write_text("tenants: nonsense")
        assert (await public.ask(first))[0] is UNAUTHENTICATED
        spec = prefill.prefills[0].spec
        prefill.is_paused = False
        await prefill.step([prefill.delta(spec, 0, 0, is_last=True)])
        assert await collect(running)
        assert (await public.ask(second))[0] is OK
    assert await scraped(public.router, "pdserve_api_keys_refused_total") == "1.0"


async def test_the_certificate_is_rotated_under_running_streams(public: Public, keys: Keys, tmp_path: Path) -> None:
    key, successor = keys.add("acme"), Authority.new()
    prefill = public.router.workers["p0"]
    prefill.is_paused = True
    async with public.client() as channel:
        running = generate(channel, key)
        await prefill.until(lambda: bool(prefill.prefills))
        successor.write_public(tmp_path / "tls", ("127.0.0.1",), DAY)
        former, public.authority = public.authority, successor
        async with public.client() as later, public.client(root_certificates=former.pem) as outdated:
            assert (await error_of(generate(outdated, key)))[0] is UNAVAILABLE
            assert await InferenceServiceStub(later).ListModels(inference.ListModelsRequest(), metadata=bearer(key))
        prefill.is_paused = False
        await prefill.step([prefill.delta(prefill.prefills[0].spec, 0, 0, is_last=True)])
        assert await collect(running)


async def test_certificates_and_keys_are_replaced_again_and_again_without_an_error_of_new_connections(
    public: Public, keys: Keys, tmp_path: Path
) -> None:
    shown, num_answered, news, is_over = [keys.add("acme")], [0] * NUM_CLIENTS, asyncio.Condition(), asyncio.Event()

    async def ask_on(client: int) -> None:
        while not is_over.is_set():
            assert (await public.ask(shown[-1]))[0] is OK
            num_answered[client] += 1
            async with news:
                news.notify_all()

    async with asyncio.TaskGroup() as tasks:
        for client in range(NUM_CLIENTS):
            tasks.create_task(ask_on(client))
        for _ in range(10):
            public.authority.write_public(tmp_path / "tls", ("127.0.0.1",), DAY)
            shown.append(keys.add("acme"))
            goals = [count + 2 for count in num_answered]  # by then each has asked with the latest key
            async with news:
                await news.wait_for(lambda goals=goals: all(map(ge, num_answered, goals)))  # type: ignore[misc]
            keys.tenants["acme"]["keys"] = keys.tenants["acme"]["keys"][-1:]  # type: ignore[index]
            keys.write()
        is_over.set()
    assert await scraped(public.router, "pdserve_api_keys_refused_total") == "0.0"
    assert (await public.ask(shown[0]))[0] is UNAUTHENTICATED


@pytest.mark.parametrize("missing", ["ssl_certfile", "api_keys_file"])
async def test_without_certificate_and_keys_it_stays_on_loopback(
    missing: str, tmp_path: Path, secret_file: Path, authority: Authority, keys: Keys
) -> None:
    authority.write_public(tmp_path / "tls", ("127.0.0.1",), DAY)
    keys.add("acme")
    files = {"ssl_certfile": tmp_path / "tls" / "tls.crt", "ssl_keyfile": tmp_path / "tls" / "tls.key"}
    given = {**files, "api_keys_file": keys.path}
    left = {name: path for name, path in given.items() if name not in (missing, missing.replace("cert", "key"))}
    with pytest.raises(ExceptionGroup) as caught:
        async with running_router(secret_file, {"host": "0.0.0.0", **left}):
            pass
    expected = "host: 0.0.0.0 is reachable .*; set ssl_certfile, ssl_keyfile and api_keys_file"
    assert caught.group_contains(ConfigError, match=expected)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("tenants: {a: {keys: [{id: k, sha256: pds_secret}]}}", r"line 1: tenants\.a\.keys\.0\.sha256"),
        ("tenants: {a: {keys: pds_secret}}", r"tenants\.a\.keys: Input should be"),
        ("tenants: {a: {keys: [], request_per_s: 1}}", r"tenants\.a\.request_per_s: unknown key"),
        ("tenants: {a: {keys: [], requests_per_s: 0}}", "requests_per_s"),
        ("tenants: {'a b': {keys: []}}", "tenants"),
        (
            f"tenants: {{a: {{keys: [{{id: k, sha256: {'0' * 64}}}]}}, b: {{keys: [{{id: l, sha256: {'0' * 64}}}]}}}}",
            "twice",
        ),
        ("- nothing", "must hold keys and values"),
        ("tenants: {", "line 1"),
    ],
)
async def test_what_is_wrong_with_a_file_of_keys_is_said_at_the_start(
    content: str, said: str, secret_file: Path, keys: Keys
) -> None:
    keys.write()
    keys.path.write_text(content)
    with pytest.raises(ExceptionGroup) as caught:
        async with running_router(secret_file, {"api_keys_file": keys.path}):
            pass
    assert caught.group_contains(ConfigError, match=f"api_keys_file: .*{said}")
    assert "pds_" not in repr(caught.value.exceptions)
