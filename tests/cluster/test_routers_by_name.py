"""Workers that know their routers by a name: one is killed and another is added under load, and no worker restarts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cluster_logs
import grpc
import pytest
from live_cluster import Answer, all_ready, greedy, is_idle
from model_zoo import first_disagreement
from proofs import operators_proof
from transformers import PreTrainedModel
from wired_cluster import Wiring, end_all, kill_all

from pdserve.launch.folder import free_port, write_secret
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

NAME, NUM_TOKENS, PROMPT = "routers.test", 20, [3, 4, 5, 6]
# pdserve on a machine whose resolver reads a file: the addresses of NAME.
PDSERVE = """
import pathlib, socket
looked_up = socket.getaddrinfo

def look_up(host, *args, **kwargs):
    hosts = pathlib.Path({file!r}).read_text().split() if host == {name!r} else [host]
    return [found for each in hosts for found in looked_up(each, *args, **kwargs)]

socket.getaddrinfo = look_up
from pdserve.__main__ import main
main()
"""


class Router:
    """A router at an address of its own, as its operator and its clients see it."""

    def __init__(self, wiring: Wiring, host: str, port: int) -> None:
        public = free_port(host)
        addresses = {"host": host, "port": public, "internal_host": host, "internal_port": port}
        name = f"router-{host}"
        flags = {"router_id": name, "served_model_name": "wired", "placement": "least_loaded", **addresses}
        self.process = wiring.start("router", name, flags)
        self.address = f"{host}:{port}"
        self._secret_file = wiring.secret_file
        self.inference = InferenceServiceStub(grpc.insecure_channel(f"{host}:{public}"))

    def until(self, wanted: Callable[[admin.ClusterStatus], bool], timeout_s: float = 60) -> admin.ClusterStatus:
        """Return the first status that is as wanted; the router may yet have to start."""
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(timeout_s)
            proof = operators_proof(channel, self._secret_file, "WatchStatus", timeout_s)
            watch = AdminServiceStub(channel).WatchStatus(admin.WatchStatusRequest(), metadata=proof, timeout=timeout_s)
            return next(update.status for update in watch if wanted(update.status))

    def ask(self) -> Answer:
        return Answer().read(self.inference.Generate(greedy(PROMPT, NUM_TOKENS), timeout=60))


@contextmanager
def loaded(router: Router) -> Iterator[list[Answer]]:
    """Ask a router one question after another for the length of the block; what one of them fails with is raised."""
    answers, errors, over = list[Answer](), list[BaseException](), threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                answers.append(router.ask())
        except grpc.RpcError as error:
            errors.append(error)

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield answers
    finally:
        over.set()
        for client in clients:
            client.join()
    assert errors == []


@pytest.fixture
def wiring(model: Path, tmp_path: Path) -> Iterator[Wiring]:
    flags = {"dtype": "float32", "num_pages": 200}
    wiring = Wiring(tmp_path, model, flags, write_secret(tmp_path), 0, free_port("127.0.0.1"))
    cluster_logs.register(tmp_path)
    yield wiring
    kill_all(wiring)
    cluster_logs.unregister(tmp_path)


@pytest.mark.long
def test_one_of_two_routers_is_killed_and_another_is_added_under_load(wiring: Wiring, oracle: PreTrainedModel) -> None:
    hosts, port = wiring.folder / "hosts", wiring.internal_port
    hosts.write_text("127.0.0.1 127.0.0.2")
    killed, kept = (Router(wiring, host, port) for host in hosts.read_text().split())
    wiring.code = PDSERVE.format(file=str(hosts), name=NAME)
    for role in ("prefill", "decode"):
        wiring.start_worker(role, role, f"{NAME}:{port}")
    wiring.code = None
    for router in (killed, kept):
        router.until(all_ready(2))
    with loaded(kept) as answers:
        answers.append(killed.ask())
        killed.process.kill()
        hosts.write_text("127.0.0.2 127.0.0.3")
        added = Router(wiring, "127.0.0.3", port)
        added.until(all_ready(2))
        answers.append(added.ask())
    assert len(answers) > 4
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert first_disagreement(oracle, PROMPT, answers[0].tokens[0]) is None
    for router in (kept, added):
        status = router.until(is_idle)
        incarnations = {worker.registration.worker_id: worker.registration.incarnation for worker in status.workers}
        assert incarnations == {name: wiring.started[name][1].incarnation for name in ("prefill", "decode")}
    end_all(wiring)
