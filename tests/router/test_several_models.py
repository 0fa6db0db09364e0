"""A frontend that serves several models, each with a router and workers of its own, by the names in requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from looking import until
from router_fakes import TEMPLATE, FakeWorker, RouterUnderTest, StartRouter, model_folder, text_of
from scraping import Scraped, scrape, snapshot
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.base.errors import ConfigError
from pdserve.launch.folder import free_port
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from pdserve.router.config import FrontendConfig
from pdserve.router.frontend import process
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.served import load_model
from pdserve.settings.config import load_config

NAMES = ("alpha", "beta")
MESSAGES = [{"role": "user", "content": "hello"}]
VERSION = {"anthropic-version": "2023-06-01"}


@dataclass
class Side:
    """A model's router, and its prefill worker, which knows what the model was asked."""

    router: RouterUnderTest
    prefill: FakeWorker


@dataclass
class Address:
    """The one address, and what is behind it."""

    url: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    metrics: str  # host:port
    sides: dict[str, Side]

    @property
    def counts(self) -> dict[str, int]:
        """How many prompts each model has computed."""
        return {name: len(side.prefill.prefills) for name, side in self.sides.items()}

    async def chat(self, model: str, **more: Any) -> httpx.Response:  # noqa: ANN401
        body = {"model": model, "messages": MESSAGES, "max_tokens": 2, **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def infer(self, model: str) -> protocol.ModelInferResponse:
        asked = protocol.ModelInferRequest(model_name=model)
        asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
        asked.parameters["max_tokens"].int64_param = 2
        return await GRPCInferenceServiceStub(self.channel).ModelInfer(asked, timeout=10)

    def generate(self, model: str) -> Any:  # noqa: ANN401
        sampling = inference.SamplingParams(max_tokens=2)
        request = inference.GenerateRequest(model=model, text="hello", sampling=sampling)
        return InferenceServiceStub(self.channel).Generate(request, timeout=10)


@pytest.fixture
async def address(start_router: StartRouter, secret_file: Path, tmp_path: Path) -> AsyncIterator[Address]:
    async with serving(start_router, secret_file, tmp_path) as found:
        yield found


class serving:  # noqa: N801 - used as a context manager
    """Serve alpha and beta at one address for the length of the block."""

    def __init__(self, start: StartRouter, secret_file: Path, folder: Path, **settings: object) -> None:
        self._start, self._secret_file, self._folder, self._settings = start, secret_file, folder, settings
        self._stack, self._stop = AsyncExitStack(), asyncio.Event()

    async def __aenter__(self) -> Address:
        model = model_folder(self._folder)
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        sides = {}
        for name in NAMES:
            router = await self._start(serve_clients=False, served_model_name=name)
            prefill = await router.worker(link.ROLE_PREFILL, "p0", model=name)
            await router.worker(link.ROLE_DECODE, "d0", model=name)
            sides[name] = Side(router, prefill)
        config = FrontendConfig.model_validate(
            {
                "secret_file": self._secret_file, "port": free_port("127.0.0.1"), "http_port": free_port("127.0.0.1"),
                "models": [
                    {"model": str(model), "served_model_name": name, "routers": [side.router.addresses.internal]}
                    for name, side in sides.items()
                ],
                "router_grace_s": 0.2, "metrics_port": free_port("127.0.0.1"), **self._settings,
            }
        )  # fmt: skip
        models = [load_model(each) for each in config.of_models()]
        self._running = asyncio.create_task(process.run(config, models, self._stop))
        for side in sides.values():
            await side.router.until_status(lambda status: len(status.frontends) == 1)
        url, target = f"http://127.0.0.1:{config.http_port}", f"127.0.0.1:{config.port}"
        http = await self._stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10))
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(target))
        return Address(url, http, channel, f"127.0.0.1:{config.metrics_port}", sides)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._stop.set()
        assert await self._running


async def test_each_model_answers_through_every_door_and_costs_the_other_nothing(address: Address) -> None:
    async def post(path: str, name: str, **body: object) -> None:
        answer = await address.http.post(path, json={"model": name, **body}, headers=VERSION)
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name

    async def native(name: str) -> None:
        assert len(text_of([reply async for reply in address.generate(name)])) == 2

    async def triton(name: str) -> None:
        assert (await address.infer(name)).model_name == name

    doors = (
        partial(post, "/v1/chat/completions", messages=MESSAGES, max_tokens=2),
        partial(post, "/v1/completions", prompt="hello", max_tokens=2),
        partial(post, "/v1/embeddings", input="hello"),
        partial(post, "/v1/responses", input="hello", max_output_tokens=2),
        partial(post, "/v1/messages", messages=MESSAGES, max_tokens=2),
        native,
        triton,
    )
    expected = dict.fromkeys(NAMES, 0)
    for door in doors:
        for name in NAMES:
            await door(name)
            expected[name] += 1
            assert address.counts == expected, f"{door} of {name}"
    counted = {"messages/count_tokens": {"messages": MESSAGES}, "responses/input_tokens": {"input": "a"}}
    for path, body in counted.items():
        for name in NAMES:
            await post(f"/v1/{path}", name, **body)
    assert address.counts == expected


async def test_a_name_that_no_model_has_and_no_name_are_404_in_the_shape_of_each_door(address: Address) -> None:
    told = "model: 'gamma' is not served here; 'alpha' and 'beta' are"
    doors = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/completions": {"prompt": "hello"},
        "/v1/completions?with=suffix": {"prompt": "hello", "suffix": "b"},
        "/v1/embeddings": {"input": "hello"},
        "/pooling": {"input": "hello"},
        "/v1/rerank": {"query": "a", "documents": []},
        "/v1/score": {"text_1": "a", "text_2": []},
        "/v1/responses": {"input": "hello"},
        "/v1/responses/input_tokens": {"input": "hello"},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": MESSAGES},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [0]},
    }
    for path, body in doors.items():
        refused = await address.http.post(path, json={"model": "gamma", **body}, headers=VERSION)
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, told), path
        assert ("type" in refused.json()) == path.startswith("/v1/messages"), path  # as Anthropic has it
        if "messages" not in path:
            unnamed = await address.http.post(path, json=body)
            assert unnamed.status_code == 404, path
            assert unnamed.json()["error"]["message"].startswith("model: '' is not served here"), path
    for call in (address.infer("gamma"), address.generate("gamma").read(), address.generate("").read()):
        with pytest.raises(grpc.aio.AioRpcError, match="'alpha' and 'beta' are") as error:
            await call
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert address.counts == dict.fromkeys(NAMES, 0)


async def test_all_models_are_listed_and_each_has_health_metrics_and_a_page_of_its_own(address: Address) -> None:
    listed = (await address.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == list(NAMES)
    for name in NAMES:
        assert (await address.http.get(f"/v1/models/{name}")).json()["id"] == name
    native = await InferenceServiceStub(address.channel).ListModels(inference.ListModelsRequest())
    assert [model.name for model in native.models] == list(NAMES)
    triton = GRPCInferenceServiceStub(address.channel)
    index = await triton.RepositoryIndex(protocol.RepositoryIndexRequest())
    assert [(model.name, model.state) for model in index.models] == [(name, "READY") for name in NAMES]
    assert (await triton.ModelReady(protocol.ModelReadyRequest(name="beta"))).ready
    assert not (await triton.ModelReady(protocol.ModelReadyRequest(name="gamma"))).ready

    with pytest.raises(grpc.aio.AioRpcError) as unknown:  # it has no names of models
        await VllmEngineStub(address.channel).HealthCheck(vllm.HealthCheckRequest())
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED

    assert (await address.chat("beta")).status_code == 200
    stats = (await triton.ModelStatistics(protocol.ModelStatisticsRequest())).model_stats
    assert [(each.name, each.inference_count) for each in stats] == [("alpha", 0), ("beta", 1)]
    own = await asyncio.to_thread(scrape, address.metrics)
    for name, count in zip(NAMES, (0, 1), strict=True):
        assert own.value("pdserve_requests_without_router", model_name=name) == 0
        text = (await address.http.get("/metrics", params={"model": name})).text
        assert Scraped(text).total("vllm:request_success_total") == count
        page = await asyncio.to_thread(snapshot, address.url, f"?model={name}")
        assert (page["facts"]["model"], list(page["models"])) == (name, [other for other in NAMES if other != name])
        assert len(page.get("ended", {})) == count


async def test_a_model_whose_router_is_lost_is_refused_while_the_other_goes_on(address: Address) -> None:
    health = health_pb2_grpc.HealthStub(address.channel)

    async def serves(name: str) -> bool:
        return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == 1

    assert [await serves(name) for name in (*NAMES, "")] == [True, True, True]
    address.sides["alpha"].router.stop.set()
    await asyncio.to_thread(until, lambda: httpx.get(f"{address.url}/ready?model=alpha").status_code == 503)
    refused = await address.chat("alpha")
    assert (refused.status_code, refused.json()["error"]["refused_because"]) == (503, "no_router")
    triton = GRPCInferenceServiceStub(address.channel)
    stats = (await triton.ModelStatistics(protocol.ModelStatisticsRequest())).model_stats
    assert [each.name for each in stats] == ["beta"]
    with pytest.raises(grpc.aio.AioRpcError) as without_router:
        await triton.ModelStatistics(protocol.ModelStatisticsRequest(name="alpha"))
    assert without_router.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await address.chat("beta")).status_code == 200
    assert [await serves(name) for name in (*NAMES, "")] == [False, True, True]
    ready = [await address.http.get("/ready", params={"model": name}) for name in (*NAMES, "")]
    assert [each.status_code for each in ready] == [503, 200, 200]
    assert [card["id"] for card in (await address.http.get("/v1/models")).json()["data"]] == list(NAMES)


async def test_a_router_of_another_model_is_not_taken(
    start_router: StartRouter, secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router, model = await start_router(serve_clients=False, served_model_name="alpha"), model_folder(tmp_path)
    ports = {"port": 0, "http_port": free_port("127.0.0.1"), "router_grace_s": 0}
    given = {"model": str(model), "served_model_name": "beta", "routers": (router.addresses.internal,), **ports}
    config, stop = FrontendConfig.model_validate({"secret_file": secret_file, **given}), asyncio.Event()
    running = asyncio.create_task(process.run(config, [load_model(config)], stop))
    said = "it serves the model 'alpha', and not 'beta'"
    await asyncio.to_thread(until, lambda: said in caplog.text)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.http_port}", timeout=10) as http:
        refused = await http.post("/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["refused_because"]) == (503, "no_router")
        assert (await http.get("/ready")).status_code == 503
    stop.set()
    assert await running


async def test_what_continues_a_response_without_a_name_goes_to_its_model(address: Address) -> None:
    async def respond(**body: object) -> dict[str, Any]:
        answer = await address.http.post("/v1/responses", json={"input": "hello", "max_output_tokens": 2, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    first = await respond(model="beta")
    second = await respond(previous_response_id=first["id"])
    assert (second["model"], address.counts) == ("beta", {"alpha": 0, "beta": 2})
    other = await respond(model="alpha", previous_response_id=second["id"])
    assert (other["model"], address.counts) == ("alpha", {"alpha": 1, "beta": 2})
    begun = await respond(previous_response_id=first["id"], background=True)
    assert begun["model"] == "beta"
    url = f"{address.url}/v1/responses/{begun['id']}"
    await asyncio.to_thread(until, lambda: httpx.get(url).json()["status"] == "incomplete")  # max_output_tokens
    assert address.counts == {"alpha": 1, "beta": 3}


async def test_the_limits_of_a_tenant_hold_for_each_model_and_no_unknown_name_counts_or_waits_for_a_router(
    start_router: StartRouter, secret_file: Path, tmp_path: Path
) -> None:
    key, digest = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"tenants: {{acme: {{keys: [{{id: web, sha256: {digest}}}], max_concurrent: 1}}}}")
    keys.chmod(0o600)
    async with serving(start_router, secret_file, tmp_path, api_keys_file=keys, router_grace_s=300) as address:
        assert (await address.chat("alpha")).status_code == 401
        address.http.headers["authorization"] = f"Bearer {key}"
        busy = address.sides["alpha"].prefill
        busy.is_paused = True
        running = asyncio.create_task(address.chat("alpha"))
        await busy.until(lambda: len(busy.prefills) == 1)
        assert (await address.chat("alpha")).status_code == 429
        assert [(await address.chat(name)).status_code for name in ("beta", "gamma")] == [200, 404]
        running.cancel()
        await busy.until(lambda: len(busy.cancels) == 1)
        address.sides["alpha"].router.stop.set()
        lost = partial(httpx.get, f"{address.url}/metrics?model=alpha", headers=address.http.headers)
        await asyncio.to_thread(until, lambda: lost().status_code == 503)
        assert (await address.chat("gamma")).status_code == 404


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: []", "model: is required"),
        ("models: ['{']", "line 2: models.0: is no JSON: [^;]*$"),
        ("model: m\nmodels: [{model: m, routers: [a:1]}]", "model: goes with one model"),
        ("routers: [a:1]\nmodels: [{model: m, routers: [a:1]}]", "routers: goes with one model"),
        ("models: [{model: m, routers: []}]", "models.0.routers: .*at least 1 item"),
        ("models: [{model: m}]", "models.0.routers: is required"),
        ("models: [{model: m, routers: [a:1], port: 1}]", "models.0.port: unknown key"),
        (
            "models: [{model: m, served_model_name: x, routers: [a:1]}, "
            "{model: n, served_model_name: x, routers: [b:1]}]",
            "models: served_model_name 'x' is the name of two",
        ),
        ("model: m", "routers: is required"),
        ("routers: [a:1]", "model: is required"),
    ],
)
def test_models_of_a_frontend_that_cannot_be_served_are_refused_by_key(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "frontend.yaml"
    file.write_text(f"secret_file: s\n{text}\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(FrontendConfig, file)


def test_two_models_of_one_name_are_refused_once_their_names_are_known(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path))
    given = {"secret_file": "s", "models": [{"model": model, "routers": ["a:1"]}, {"model": model, "routers": ["b:1"]}]}
    with pytest.raises(ConfigError, match="models: 'model' is the name of two"):
        asyncio.run(process.serve(FrontendConfig.model_validate(given)))


def test_a_model_takes_from_the_frontend_what_it_does_not_say_itself() -> None:
    given = {"secret_file": "s", "max_model_len": 100, "router_grace_s": 3.0}
    one = {"model": "m", "routers": ["a:1"], "max_model_len": 50}
    config = FrontendConfig.model_validate({**given, "models": [json.dumps(one), {"model": "n", "routers": ["b:1"]}]})
    first, second = config.of_models()
    assert (first.model, first.routers, first.max_model_len, first.router_grace_s) == ("m", ("a:1",), 50, 3.0)
    assert (second.model, second.routers, second.max_model_len, second.models) == ("n", ("b:1",), 100, ())
