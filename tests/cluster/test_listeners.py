"""What a running cluster shows to others: sockets on the addresses of its configuration alone, and its metrics."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import LiveCluster, greedy, is_idle, live_cluster
from scraping import Scraped, scrape
from sockets import LISTENERS, assert_listens_where_it_says

pytestmark = pytest.mark.long

FLAGS = ("--dtype", "float32", "--num-pages", "100", "--prefill", "2", "--decode", "2")
NUM_REQUESTS, NUM_TOKENS = 8, 5
OPERATE = Path(__file__).parents[2] / "docs" / "operate.md"


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *FLAGS) as cluster:
        asked = [greedy([seed, *range(5, 60)], NUM_TOKENS) for seed in range(3, 3 + NUM_REQUESTS)]
        for request in asked:
            request.slo.ttft_ms = 1e6
        cluster.generate_all(asked)
        cluster.wait_for(is_idle, 20)
        yield cluster


def test_the_table_of_ports_for_operators_is_what_processes_are_held_to() -> None:
    _, _, table = OPERATE.read_text().partition("| port | of | set by | default |")
    found: dict[str, set[str]] = {process: set() for process in LISTENERS}
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        port, of, _, default, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        processes = {"each": ("router", "frontend", "worker"), "`pdserve up`": ("launcher",)}.get(of, of.split(", "))
        for process in processes if default not in ("off", "none") else ():
            found[process].add(port.lower().replace("-", ""))
    assert found == LISTENERS


def test_every_process_of_a_local_cluster_listens_where_it_says(cluster: LiveCluster) -> None:
    assert_listens_where_it_says(cluster)


def test_every_process_shows_metrics_that_agree_on_what_was_served(cluster: LiveCluster) -> None:
    state = cluster.state
    targets = json.loads(state.secret_file.with_name("metrics.json").read_text())
    addresses = {each["labels"]["process"]: each["targets"][0] for each in targets}
    assert addresses == {process.name: process.metrics_address for process in state.processes}
    found = {name: scrape(address) for name, address in addresses.items()}
    router, workers = found.pop("router"), tuple(found.values())
    router.assert_complete("router")
    assert len(workers) == 4
    for worker in workers:
        worker.assert_complete("worker")
        assert_rests(worker)
    model = {"model_name": state.model}
    assert router.value("vllm:request_generation_tokens_sum", **model) == NUM_REQUESTS * NUM_TOKENS
    assert router.value("vllm:time_to_first_token_seconds_count", **model) == NUM_REQUESTS
    assert router.value("pdserve_requests_ended_total", status="OK") == NUM_REQUESTS
    assert router.value("pdserve_goodput_requests_total", priority_class="normal") == NUM_REQUESTS
    assert router.value("pdserve_handoff_seconds_count") == NUM_REQUESTS
    sampled = sum(worker.total("vllm:generation_tokens_total") for worker in workers)
    assert sampled == NUM_REQUESTS * NUM_TOKENS
    followed = sum(worker.total("vllm:inter_token_latency_seconds_count") for worker in workers)
    assert followed == sampled - NUM_REQUESTS  # the first token of each comes of its prompt


def assert_rests(worker: Scraped) -> None:
    """Fail unless a worker has no page in use, and the states of its pages add up."""
    assert worker.total("vllm:kv_cache_usage_perc") == 0
    assert worker.total("pdserve_kv_pages") == 100
    assert worker.value("pdserve_kv_pages", state="held") == 0
    assert worker.total("pdserve_handoffs") == 0
