"""Two frontends: the end of one costs its own connections alone, and the router's end costs none."""

import http.client
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from frontend_owners import frontends, own_ports, owner
from live_cluster import LiveCluster, greedy, is_idle, live_cluster, load_of
from looking import PATIENCE_S, until
from model_zoo import VOCAB, first_disagreement
from scraping import scrape
from sockets import assert_listens_where_it_says
from transformers import PreTrainedModel

from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

NUM_TOKENS = 500
NUM_OF_EACH = 2  # clients, of each frontend and protocol

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    flags = ("--dtype", "float32", "--num-pages", "1000", "--test-step-s", "0.005", "--num-frontends", "2")
    with live_cluster(folder, model, *flags) as cluster:
        yield cluster


class Client:
    """A connection of its own, on which one answer is read."""

    port: int  # its own end's

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_failed = False

    def read(self, prompt: list[int], num_tokens: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class GrpcClient(Client):
    def __init__(self, address: str) -> None:
        super().__init__()
        before = own_ports(address)
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        grpc.channel_ready_future(self._channel).result(PATIENCE_S)
        (self.port,) = own_ports(address) - before

    def read(self, prompt: list[int], num_tokens: int) -> None:
        try:
            for reply in InferenceServiceStub(self._channel).Generate(greedy(prompt, num_tokens), timeout=60):
                self.tokens += [token for delta in reply.deltas for token in delta.token_ids]
        except grpc.RpcError as error:
            self.has_failed = error.code() is grpc.StatusCode.UNAVAILABLE

    def close(self) -> None:
        self._channel.close()


class HttpClient(Client):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._connection.connect()
        self.port = self._connection.sock.getsockname()[1]

    def read(self, prompt: list[int], num_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            asked, headers = json.dumps({**body, "return_token_ids": True}), {"content-type": "application/json"}
            self._connection.request("POST", "/v1/completions", asked, headers)
            response = self._connection.getresponse()
            assert response.status == 200
            while (line := response.readline()) != b"data: [DONE]\n":
                if not line:
                    raise ConnectionResetError
                if line.startswith(b"data: "):
                    choices = json.loads(line[6:])["choices"]
                    self.tokens += [token for choice in choices for token in choice.get("token_ids") or ()]
        except (ConnectionResetError, http.client.IncompleteRead):
            self.has_failed = True

    def close(self) -> None:
        self._connection.close()


def clients_of_each(cluster: LiveCluster) -> dict[int, list[Client]]:
    """Connect over both protocols until each frontend has its clients; the kernel chooses."""
    http_address = cluster.state.http.removeprefix("http://")
    found: dict[int, list[Client]] = {process.pid: [] for process in frontends(cluster.process.pid)}
    for make in (lambda: GrpcClient(cluster.endpoint), lambda: HttpClient(http_address)):
        wanted = dict.fromkeys(found, NUM_OF_EACH)
        while any(wanted.values()):
            client = make()
            pid = owner(cluster.process.pid, client.port)
            if wanted[pid]:
                wanted[pid] -= 1
                found[pid].append(client)
            else:
                client.close()
    return found


def test_frontends_listen_in_the_place_of_the_router(cluster: LiveCluster) -> None:
    assert_listens_where_it_says(cluster)


@pytest.mark.long
def test_a_killed_frontend_costs_its_own_connections_alone_and_another_takes_its_place(
    cluster: LiveCluster, oracle: PreTrainedModel
) -> None:
    rng = random.Random(3)
    of_each = clients_of_each(cluster)
    killed, kept = of_each
    clients = [client for pid in of_each for client in of_each[pid]]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        reading = [
            pool.submit(client.read, prompt, NUM_TOKENS) for client, prompt in zip(clients, prompts, strict=True)
        ]
        until(lambda: all(client.tokens for client in clients))
        with cluster.frozen("decode-0"):
            assert not any(done.done() for done in reading), "they were to be in mid-stream"
            os.kill(killed, signal.SIGKILL)
            cluster.wait_for(lambda status: status.num_active == len(of_each[kept]), 3)
        for done in reading:
            done.result()
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.has_failed is (client in of_each[killed])
        assert first_disagreement(oracle, prompt, client.tokens) is None
        assert client.has_failed or len(client.tokens) == NUM_TOKENS
        client.close()
    cluster.wait_for(is_idle, 5)
    status = cluster.status()
    assert {load_of(status, name).pages_granted for name in ("prefill-0", "decode-0")} == {0}
    until(lambda: num_frontends(cluster) == (2, 1))
    running = {process.pid for process in frontends(cluster.process.pid)}
    assert killed not in running
    of_each = clients_of_each(cluster)
    assert of_each.keys() == running
    for client in (client for pid in of_each for client in of_each[pid]):
        client.read([4, 5, 6], 8)
        assert first_disagreement(oracle, [4, 5, 6], client.tokens) is None
        assert len(client.tokens) == 8
        client.close()
    cluster.wait_for(is_idle, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_streams_go_on_when_the_router_ends(
    cluster: LiveCluster, oracle: PreTrainedModel, number: signal.Signals
) -> None:
    rng = random.Random(int(number))
    router, running = cluster.pid_of("router"), {process.pid for process in frontends(cluster.process.pid)}
    of_each = clients_of_each(cluster)
    clients = [client for pid in of_each for client in of_each[pid]]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in clients]
    late = GrpcClient(cluster.endpoint)
    with ThreadPoolExecutor(len(clients) + 1) as pool:
        reading = [
            pool.submit(client.read, prompt, NUM_TOKENS) for client, prompt in zip(clients, prompts, strict=True)
        ]
        until(lambda: all(client.tokens for client in clients))
        os.kill(router, number)
        until(lambda: cluster.state.pid_of("router") != router)
        reading.append(pool.submit(late.read, [4, 5, 6], 8))
        for done in reading:
            done.result()
    for client, prompt in zip(clients, prompts, strict=True):
        assert not client.has_failed
        assert len(client.tokens) == NUM_TOKENS
        assert first_disagreement(oracle, prompt, client.tokens) is None
    assert len(late.tokens) == 8
    for client in (*clients, late):
        client.close()
    assert {process.pid for process in frontends(cluster.process.pid)} == running
    cluster.wait_for(is_idle, 30)


def num_frontends(cluster: LiveCluster) -> tuple[float, float]:
    """Return how many frontends the router has now, and how many it has lost."""
    (router,) = (process for process in cluster.state.processes if process.role == "router")
    shown = scrape(router.metrics_address)
    return shown.value("pdserve_frontends"), shown.value("pdserve_frontends_lost_total")
