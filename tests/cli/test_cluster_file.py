"""A cluster in a file: each process gets what its section sets; what is wrong is named with its line."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.cli import running
from pdserve.cli.cluster_file import read_clusters
from pdserve.launch.plan import ClusterSpec, Wiring

WHOLE = """
model: some-model
name: mine
max_workers: 5
router:
  host: 127.0.0.2
  port: 7000
  placement: round_robin
  health_port: 7001
workers:
  prefill: {replicas: 2, num_pages: 100, drain_timeout_s: 7}
  decode: &decode
    num_pages: 200
    max_num_seqs: 9
  mixed: {<<: *decode, replicas: 1, num_pages: 300}
autoscaler:
  policy: /policy.yaml
  log_level: debug
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(WHOLE)
    return path


def arguments(command: tuple[str, ...]) -> dict[str, str]:
    """Return the flags of a command line."""
    return {key: value for key, value in pairwise(command) if key.startswith("--")}


def test_each_process_gets_what_its_section_sets_and_flags_override_it(file: Path) -> None:
    (settings,) = read_clusters(file)
    assert settings.pop("replicas") == {"prefill": 2, "mixed": 1}
    assert settings.pop("policy") == Path("/policy.yaml")
    spec = ClusterSpec(
        **settings,
        served_model_name="m",
        num_prefill=2,
        num_mixed=1,
        autoscaling=Path("/policy.yaml"),
        worker_flags={"max_num_seqs": 3},
    )
    assert (spec.model, spec.name, spec.host, spec.router_port, spec.max_workers) == (
        *("some-model", "mine", "127.0.0.2", 7000),
        5,
    )
    assert spec.drain_timeout_s == 25, "of the workers that have no other"
    assert replace(spec, router_flags={"drain_timeout_s": 60.0}).drain_timeout_s == 60
    assert replace(spec, worker_flags={"drain_timeout_s": 5.0}).drain_timeout_s == 5
    wiring = Wiring(spec, public_port=50051, internal_port=50052, secret_file=Path("/run/secret"))
    children = {child.name: arguments(child.command) for child in wiring.children()}
    assert (children["router"]["--placement"], children["router"]["--health-port"]) == ("round_robin", "7001")
    pages = {name: each["--num-pages"] for name, each in children.items() if "--num-pages" in each}
    assert pages == {"prefill-0": "100", "prefill-1": "100", "decode-0": "200", "mixed-0": "300"}
    assert {children[name]["--max-num-seqs"] for name in pages} == {"3"}
    assert children["prefill-0"]["--drain-timeout-s"] == "7.0"
    assert children["autoscaler"]["--log-level"] == "debug"


@pytest.mark.parametrize(("flags", "name"), [((), "mine"), (("--name", "default"), "default")])
def test_a_name_that_is_given_overrides_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pdserve: Callable[..., object], flags: tuple[str, ...], name: str
) -> None:
    file, started = tmp_path / "cluster.yaml", list[str]()
    file.write_text("model: /\nname: mine\n")

    async def note(specs: tuple[ClusterSpec, ...], terminal: object) -> None:
        del terminal
        started.extend(spec.name for spec in specs)

    monkeypatch.setattr(running, "serve_until_signal", note)
    pdserve("up", "--config", str(file), *flags)
    assert started == [name]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("placement:", "placementx:", "line 8: router.placementx: unknown key, did you mean placement?"),
        ("num_pages: 200", "num_page: 200", "line 13: workers.decode.num_page: unknown key, did you mean num_pages?"),
        ("\nworkers:", "\nworker:", "line 10: worker: unknown key, did you mean workers?"),
        ("  decode: &", "  decoder: &", "line 12: workers.decoder: unknown key, did you mean decode?"),
        ("max_num_seqs: 9", "max_num_seqs: 0", "line 14: workers.decode.max_num_seqs: 0 is refused"),
        ("num_pages: 200", "role: mixed", "line 13: workers.decode.role: unknown key"),
        ("num_pages: 200", "worker_id: w", "line 13: workers.decode.worker_id: unknown key"),
        ("port: 7000", "port: 70000", "line 7: router.port: 70000 is refused"),
        ("policy:", "policyx:", "line 17: autoscaler.policyx: unknown key, did you mean policy?"),
        ("policy: /policy.yaml", "policy_resource: a/b", "line 17: autoscaler.policy_resource: unknown key"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_the_nearest_key(
    file: Path, before: str, after: str, words: str
) -> None:
    assert WHOLE.count(before) == 1
    file.write_text(WHOLE.replace(before, after))
    with pytest.raises(ConfigError) as refused:
        read_clusters(file)
    assert words in str(refused.value)
