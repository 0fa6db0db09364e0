"""Two models behind one address, `pdserve up --config FILE`: each answers for itself, and is lost alone."""

import json
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from live_cluster import LiveCluster, all_ready, greedy, is_idle, live_cluster
from looking import until
from model_zoo import first_disagreement, load_oracle, prompt, write_model
from scraping import Scraped

from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

pytestmark = pytest.mark.slow

FAMILIES = {"alpha": "llama3", "beta": "qwen3"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NUM_TOKENS = 12


class Both:
    """The cluster whose frontend serves both, and the one behind it."""

    def __init__(self, clusters: dict[str, LiveCluster], paths: dict[str, Path]) -> None:
        self.clusters = clusters
        self.http = httpx.Client(base_url=clusters["alpha"].state.http, timeout=60)
        self.oracles = {name: load_oracle(path) for name, path in paths.items()}

    def ask(self, name: str, seed: int) -> None:
        """Have a model answer, and compare its tokens with transformers'."""
        asked = greedy(ids := prompt(40, seed), NUM_TOKENS)
        asked.model = name
        (answer,) = self.clusters["alpha"].generate(asked).tokens.values()
        assert first_disagreement(self.oracles[name], ids, answer) is None, name

    def num_ended(self, name: str) -> float:
        return Scraped(self.http.get("/metrics", params={"model": name}).text).total("vllm:request_success_total")

    def post(self, path: str, name: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401
        answer = self.http.post(path, json={"model": name, **body}, headers={"anthropic-version": "2023-06-01"})
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        assert shown["model"] == name
        return shown

    def infer(self, name: str, text: str) -> str:
        asked = protocol.ModelInferRequest(model_name=name)
        asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
        for key, value in (("max_tokens", NUM_TOKENS), ("temperature", 0)):
            asked.parameters[key].int64_param = value
        stub = GRPCInferenceServiceStub(self.clusters["alpha"].channel)
        (length,) = struct.unpack_from("<I", raw := stub.ModelInfer(asked, timeout=60).raw_output_contents[0])
        return raw[4 : 4 + length].decode()


def write_both(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Write two models and a file that has both; return their folders, and the flags that lead to the file."""
    paths = {name: write_model(family, folder / name) for name, family in FAMILIES.items()}
    for path in paths.values():
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    models = [{"model": str(path), "served_model_name": name} for name, path in paths.items()]
    (folder / "both.yaml").write_text(yaml.safe_dump({"name": "both", "models": models}))
    return paths, ["--config", str(folder / "both.yaml"), "--dtype", "float32", "--num-pages", "400"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("cluster")
    paths, flags = write_both(folder)
    with live_cluster(folder, None, *flags, name="both") as alpha:
        beta = LiveCluster(alpha.process, folder, "both-beta")
        for cluster in (alpha, beta):
            cluster.wait_for(all_ready(2), 60)
        assert (alpha.state.lead, beta.state.lead) == ("", "both")
        both = Both({"alpha": alpha, "beta": beta}, paths)
        with both.http:
            yield both
        for cluster in (alpha, beta):
            cluster.wait_for(is_idle, 30)
        beta.close()
    assert all((folder / "pdserve" / name / "drained").exists() for name in ("both", "both-beta"))


@pytest.mark.long
def test_each_model_answers_for_itself_through_every_door(both: Both) -> None:
    chat = [{"role": "user", "content": "hello"}]
    greedily = {"temperature": 0}
    doors: dict[str, Callable[[str], object]] = {
        "chat": lambda name: both.post("/v1/chat/completions", name, messages=chat, max_tokens=NUM_TOKENS, **greedily)[
            "choices"
        ][0]["message"]["content"],
        "completions": lambda name: both.post(
            "/v1/completions", name, prompt="user: hello\nassistant:", max_tokens=NUM_TOKENS, **greedily
        )["choices"][0]["text"],
        "responses": lambda name: both.post(
            "/v1/responses", name, input="hello", max_output_tokens=NUM_TOKENS, **greedily
        )["output"][0]["content"][0]["text"],
        "messages": lambda name: both.post("/v1/messages", name, messages=chat, max_tokens=NUM_TOKENS, **greedily)[
            "content"
        ][0]["text"],
        "open inference": lambda name: both.infer(name, "user: hello\nassistant:"),
        "embeddings": lambda name: both.post("/v1/embeddings", name, input="hello")["data"][0]["embedding"],
    }
    texts: dict[str, set[object]] = {name: set() for name in FAMILIES}
    for door, ask in doors.items():
        for name, other in (("alpha", "beta"), ("beta", "alpha")):
            before = both.num_ended(name), both.num_ended(other)
            answer = ask(name)
            until(lambda name=name, before=before: both.num_ended(name) == before[0] + 1)  # type: ignore[misc]
            assert both.num_ended(other) == before[1], f"{door} of {name} cost {other} something"
            if door != "embeddings":
                texts[name].add(answer)
    assert [len(found) for found in texts.values()] == [1, 1], "the same prompt has one greedy answer, by any door"
    assert texts["alpha"] != texts["beta"]
    for name in FAMILIES:
        both.ask(name, seed=1)


@pytest.mark.long
def test_a_model_whose_workers_are_killed_comes_back_and_the_other_notices_nothing(both: Both) -> None:
    alpha, beta = both.clusters.values()
    before = {process.name: process for process in alpha.state.processes}
    is_over, num_answers = threading.Event(), 0

    def keep_asking() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            both.ask("alpha", seed=num_answers)
            num_answers += 1

    failures: list[BaseException] = []
    asking = threading.Thread(target=lambda: _noting(keep_asking, failures))
    asking.start()
    try:
        incarnations = {each.name: each.incarnation for each in beta.state.processes}
        for name in ("prefill-0", "decode-0"):
            beta.signal(name, signal.SIGKILL)
        waits = greedy(prompt(40, "waits"), NUM_TOKENS)
        waits.model = "beta"
        with pytest.raises(grpc.RpcError) as refused:
            alpha.generate(waits, timeout_s=0.3)  # none of its workers starts as fast
        assert refused.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        both.ask("alpha", seed=-1)
        beta.wait_for(all_ready(2), 90)
        both.ask("beta", seed=2)
        assert all(each.incarnation != incarnations[each.name] for each in beta.state.processes if "-0" in each.name)
    finally:
        is_over.set()
        asking.join()
    assert not failures, failures
    assert num_answers > 0
    assert {process.name: process for process in alpha.state.processes} == before


def _noting(work: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the test raises it
        failures.append(error)


@pytest.mark.long
def test_both_models_answer_over_tls_and_their_clusters_trust_one_authority(tmp_path: Path) -> None:
    paths, flags = write_both(tmp_path)
    with live_cluster(tmp_path, None, *flags, "--tls", name="both") as alpha:
        beta = LiveCluster(alpha.process, tmp_path, "both-beta")
        for name, cluster in (("alpha", alpha), ("beta", beta)):
            cluster.wait_for(all_ready(2), 60)
            asked = greedy(ids := prompt(40, name), NUM_TOKENS)
            asked.model = name
            (answer,) = alpha.generate(asked).tokens.values()
            assert first_disagreement(load_oracle(paths[name]), ids, answer) is None, name
        beta.close()
