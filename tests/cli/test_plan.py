"""What the launcher writes on a command line is what the process reads from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pdserve.base.errors import ConfigError
from pdserve.base.ids import Incarnation
from pdserve.cli.flags import config_flags
from pdserve.cli.processes import CONFIGS
from pdserve.launch.plan import ChildSpec, ClusterSpec, Wiring, flag_arguments, threads_each
from pdserve.router.config import RouterConfig
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.settings.process import ProcessConfig

WIRING = Wiring(ClusterSpec("m", "m"), public_port=50051, internal_port=50052, secret_file=Path("/run/a secret"))
MODEL = '/models/it\'s; a "model" $(x)'


def children_of(spec: ClusterSpec) -> tuple[ChildSpec, ...]:
    return replace(WIRING, spec=spec).children()


def read_back(child: ChildSpec) -> ProcessConfig:
    """Return the configuration that the child's command line stands for."""
    arguments = child.command_for(Incarnation(2**64 - 1))
    at = arguments.index("pdserve") + 1
    cls = CONFIGS[arguments[at]]
    read: list[ProcessConfig] = []
    app = typer.Typer()

    @config_flags(cls)
    def command(**flags: object) -> None:
        read.append(load_config(cls, None, flags))

    app.command()(command)
    result = CliRunner().invoke(app, arguments[at + 1 :], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return read[0]


def test_the_processes_of_a_cluster_agree_and_have_names_of_their_own() -> None:
    spec = ClusterSpec(
        model=MODEL,
        served_model_name="m",
        num_prefill=2,
        num_decode=1,
        worker_flags={
            "page_size": 32,
            "dtype": "float32",
            "max_model_len": None,
            "speculative_config": {"method": "ngram", "prompt_lookup_min": 3},
        },
        router_flags={"max_num_held": 7, "host": "0.0.0.0"},
    )
    router, *workers = (read_back(child) for child in children_of(spec))
    assert isinstance(router, RouterConfig)
    assert (router.host, router.port, router.internal_port) == ("0.0.0.0", 50051, 50052)
    assert router.max_num_held == 7
    names = []
    for worker in workers:
        assert isinstance(worker, WorkerConfig)
        assert worker.speculative_config is not None
        assert (worker.speculative_config.method, worker.speculative_config.prompt_lookup_min) == ("ngram", 3)
        names.append(worker.worker_id)
        assert worker.routers == ("127.0.0.1:50052",)
        assert (worker.model, worker.served_model_name, worker.secret_file) == (MODEL, "m", WIRING.secret_file)
        assert (worker.page_size, worker.dtype, worker.max_model_len) == (32, "float32", None)
        assert worker.incarnation == 2**64 - 1
    assert names == ["prefill-0", "prefill-1", "decode-0"]
    assert [worker.role for worker in workers if isinstance(worker, WorkerConfig)] == ["prefill", "prefill", "decode"]
    assert (router.model, router.served_model_name, router.secret_file) == (MODEL, "m", WIRING.secret_file)


@pytest.mark.parametrize(("prefill", "decode", "flag"), [(0, 1, "--prefill"), (1, 0, "--decode"), (-1, 1, "--prefill")])
def test_a_pool_without_workers_is_refused(prefill: int, decode: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ClusterSpec(model="m", served_model_name="m", num_prefill=prefill, num_decode=decode)


def test_mixed_workers_need_no_others_beside_them() -> None:
    spec = ClusterSpec(model="m", served_model_name="m", num_prefill=0, num_decode=0, num_mixed=2)
    children = children_of(spec)
    assert [child.name for child in children] == ["router", "mixed-0", "mixed-1"]
    assert [read_back(child).role for child in children[1:]] == ["mixed", "mixed"]  # type: ignore[attr-defined]


def test_a_flag_goes_to_every_worker_and_one_that_no_worker_has_is_refused() -> None:
    spec = ClusterSpec(model="m", served_model_name="m", worker_flags={"lease_s": 2.5, "digests": "off"})
    for child in children_of(spec)[1:]:
        read = read_back(child)
        assert isinstance(read, WorkerConfig)
        assert (read.lease_s, read.digests) == (2.5, "off")
    with pytest.raises(ConfigError, match="--leese-s"):
        ClusterSpec(model="m", served_model_name="m", worker_flags={"leese_s": 1.0})


def endpoints(event: str, replay: str | None = None) -> list[tuple[str | None, str | None]]:
    """Return where each of three workers publishes and replays."""
    flags = {"kv_events_endpoint": event, "kv_events_replay_endpoint": replay}
    spec = ClusterSpec(model="m", served_model_name="m", num_prefill=2, worker_flags=flags)
    _, *workers = (read_back(child) for child in children_of(spec))
    assert all(isinstance(worker, WorkerConfig) for worker in workers)
    return [(w.kv_events_endpoint, w.kv_events_replay_endpoint) for w in workers if isinstance(w, WorkerConfig)]


def test_each_worker_publishes_kv_events_where_no_other_does() -> None:
    paths = ["ipc:///run/kv.prefill-0", "ipc:///run/kv.prefill-1", "ipc:///run/kv.decode-0"]
    assert endpoints("ipc:///run/kv") == [(path, None) for path in paths]
    ports = ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0")  # each takes one that is free
    assert endpoints(*ports) == [ports] * 3


@pytest.mark.parametrize("endpoints_given", [("tcp://*:5557", None), ("tcp://*:*", "tcp://127.0.0.1:5558")])
def test_a_port_for_kv_events_that_workers_would_share_is_refused(endpoints_given: tuple[str, str | None]) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-.*endpoint: .*555. can be one worker's alone"):
        endpoints(*endpoints_given)


def test_what_is_not_set_is_not_written_and_what_cannot_be_is_refused() -> None:
    written = flag_arguments({"a_b": None, "c": False, "d": ("x", 1), "e": 0.5, "f": {"g": None}})
    assert written == ("--no-c", "--d", "x", "--d", "1", "--e", "0.5", "--f", '{"g": null}')
    with pytest.raises(TypeError, match="f: a flag cannot carry"):
        flag_arguments({"f": object()})


def test_two_workers_use_every_core_and_more_of_them_share_the_cores() -> None:
    assert threads_each(num_workers=2, num_cores=8) is None
    assert threads_each(num_workers=4, num_cores=8) == 4
    assert threads_each(num_workers=4, num_cores=2) == 1
    assert threads_each(num_workers=64, num_cores=2) == 1


def test_fewer_workers_than_it_begins_with_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-workers: 2 is refused: 3 are started"):
        ClusterSpec(model="m", served_model_name="m", num_decode=2, max_workers=2)


def test_more_workers_than_a_machine_has_room_for_are_refused_before_any_is_planned() -> None:
    with pytest.raises(ConfigError, match="1000000001 workers are over the limit of 1024 on one machine"):
        ClusterSpec(model="m", served_model_name="m", num_prefill=10**9)
    ClusterSpec(model="m", served_model_name="m", num_prefill=10**9, elsewhere=True)


def test_an_autoscaler_is_one_more_process_and_no_worker() -> None:
    policy = Path("/policies/a policy.yaml")
    spec = ClusterSpec(model="m", served_model_name="m", name="mine", autoscaling=policy)
    *_, autoscaler = children_of(spec)
    assert autoscaler.command_for(Incarnation(7))[3:] == (
        *("pdserve", "autoscale", "run", "--policy", str(policy)),
        *("--name", "mine"),
    )
