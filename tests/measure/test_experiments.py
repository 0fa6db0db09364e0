"""What experiments on live clusters add up to, and the profile made of what a router has learnt."""

from pathlib import Path

import pytest
from cluster_states import cluster_state

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError, ConfigError
from pdserve.launch.folder import write_secret
from pdserve.measure.client import Client, connect
from pdserve.measure.live import LiveCluster
from pdserve.measure.outcomes import Objective, Outcome, summarize
from pdserve.measure.overload import Findings, Trial, served
from pdserve.measure.profile import bursts, learnt_profile
from pdserve.measure.workload import fixed_lengths
from pdserve.perfmodel.curve import Curve
from pdserve.perfmodel.profile import WindowFields, read_profile, write_profile
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.link import layout_to_proto

OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.1)
LAYOUT = layout_to_proto(KvLayout("w", 30, 3, 64, 16, "bfloat16"))


def answered(ttft_s: float) -> Outcome:
    made = Outcome(1.0, 10, 2, status="OK")
    made.take(1, 1 + ttft_s)
    made.take(1, 1.05 + ttft_s)
    made.ended_s = made.last_s
    return made


def refused(after_s: float, retry_after_s: float | None) -> Outcome:
    return Outcome(1.0, 10, 2, status="RESOURCE_EXHAUSTED", ended_s=1 + after_s, retry_after_s=retry_after_s)


def worker(role: "link.Role.ValueType", num_pages: int, chunk: int) -> admin.WorkerStatus:
    told = link.Register(role=role, ready=True, layout=LAYOUT, num_pages=num_pages, max_num_batched_tokens=chunk)
    told.max_num_seqs = 64
    return admin.WorkerStatus(registration=told)


def status(num_steps: int) -> admin.ClusterStatus:
    prefill = admin.LearntCosts(
        role=link.ROLE_PREFILL,
        prefill_step_s=0.02,
        prefill_token_s=0.0007,
        prefill_work_s=1e-7,
        num_prefill_steps=num_steps,
    )
    decode = admin.LearntCosts(
        role=link.ROLE_DECODE,
        decode_step_s=0.025,
        decode_sequence_s=0.002,
        decode_kv_token_s=1e-6,
        num_decode_steps=num_steps,
    )
    workers = [worker(link.ROLE_PREFILL, 1000, 2048), worker(link.ROLE_DECODE, 800, 512)]
    return admin.ClusterStatus(model="m", workers=workers, costs=[prefill, decode])


def test_those_refused_count_in_the_attainment_but_not_among_the_admitted() -> None:
    outcomes = [answered(0.1), answered(0.2), answered(0.9), refused(0.01, 0.5), refused(0.03, None)]
    found = summarize("goodput", outcomes, OBJECTIVE, duration_s=10.0)
    assert found.goodput_per_s == pytest.approx(0.2)
    assert found.attainment == pytest.approx(2 / 5)
    assert found.admitted_attainment == pytest.approx(2 / 3)
    assert found.refused == pytest.approx(2 / 5)
    assert found.refusal_s is not None
    assert found.refusal_s.p99 == pytest.approx(0.03, rel=0.02)
    assert found.retry_after == pytest.approx(0.5)


def test_a_learnt_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    profile = learnt_profile(status(100), "a test")
    write_profile(tmp_path / "learnt.yaml", profile)
    read = read_profile(tmp_path / "learnt.yaml")
    assert read == profile
    costs = read.configuration(1).costs()
    assert costs.prefill == Curve(0.02, 0.0007, 1e-7)
    assert costs.decode_curve(5) == Curve(0.025, 0.002, 1e-6)
    assert read.kv_bytes_per_token == 23_040
    assert read.configuration(1).kv_tokens == 800 * 16


def test_a_learnt_profile_knows_the_window_of_layers_with_pages_of_their_own(tmp_path: Path) -> None:
    told = status(100)
    sliding = KvGroup("window", 90, 3, 64, 16, window=128)
    for each in told.workers:
        each.registration.layout.CopyFrom(layout_to_proto(KvLayout("w", 30, 3, 64, 48, "bfloat16", others=(sliding,))))
    write_profile(tmp_path / "learnt.yaml", learnt_profile(told, "a test"))
    read = read_profile(tmp_path / "learnt.yaml")
    assert read.window == WindowFields(tokens=128, ratio=3)
    assert read.kv_bytes_per_token == 4 * 23_040
    assert read.configuration(1).kv_tokens == 800 * 16 * 3 // 4


def test_a_learnt_profile_keeps_what_each_size_of_batch_costs() -> None:
    told = status(100)
    for max_sequences, step_s, num_steps in ((1, 0.01, 50), (3, 0.02, 5), (7, 0.03, 50), (15, 0.04, 50)):
        told.costs[1].decode_batches.add(max_sequences=max_sequences, step_s=step_s, num_steps=num_steps)
    costs = learnt_profile(told, "a test").configuration(1).costs()
    assert [costs.decode_curve(size).step_s for size in (1, 3, 7, 8, 100)] == [0.01, 0.03, 0.03, 0.04, 0.04]


def test_a_learnt_profile_is_of_the_kind_of_workers_of_which_most_was_seen() -> None:
    told = status(100)
    told.costs[0].device = "GPU A"
    told.costs.add(
        role=link.ROLE_PREFILL, device="GPU B", prefill_step_s=0.5, prefill_token_s=0.1, num_prefill_steps=30
    )
    profile = learnt_profile(told, "a test")
    assert profile.device == "GPU A"
    assert profile.configuration(1).costs().prefill == Curve(0.02, 0.0007, 1e-7)


def test_no_profile_is_made_of_a_router_that_has_seen_too_little() -> None:
    with pytest.raises(ConfigError, match="the router has seen 3 prefill and 3 decode steps; 8 of each"):
        learnt_profile(status(3), "a test")


def test_a_sweep_has_single_prompts_and_batches_and_fits_the_model() -> None:
    sent = bursts(200, 300, 0)
    shapes = [burst[0] for burst in sent]
    assert {1, 2, 12} < {len(burst) for burst in sent}
    assert max(shape.prompt_tokens + shape.output_tokens for shape in shapes) <= 300
    assert max(shape.prompt_tokens for shape in shapes) > 200
    assert any(shape.output_tokens == 1 for shape in shapes)


async def test_a_load_that_brings_no_request_in_its_time_is_an_error_in_words(tmp_path: Path) -> None:
    trial = Trial(fixed_lengths("w", 1, 8, 2), (0.5,), seconds=1.0, calibration_s=2.0)
    async with connect("127.0.0.1:1", None) as channel:
        live = LiveCluster(cluster_state(write_secret(tmp_path)), Client(channel, MonotonicClock()), 1)
        with pytest.raises(CommandError, match=r"no request comes in 1 s at 0\.00 requests/s: --seconds is too short"):
            await anext(served(live, trial, Findings("w", 1e-9, OBJECTIVE), lambda _: None))


async def test_a_measurement_shows_the_operators_certificate_where_the_cluster_asks_for_one(tmp_path: Path) -> None:
    state = cluster_state(write_secret(tmp_path), identity_dir=tmp_path / "identity")
    async with connect(state.admin, None) as channel:
        live = LiveCluster(state, Client(channel, MonotonicClock()), 1)
        with pytest.raises(ConfigError, match="identity_dir"):
            await live.status()
