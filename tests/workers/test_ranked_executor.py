"""A worker of two ranks: one in this process, and a child that is told what to compute and ends with it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_runs import engine_of, tokens_of
from greedy_runs import spec
from long_cases import long, long_but
from looking import until
from model_zoo import write_model
from rank_pages import pages_of, ranks, whole_page
from safetensors.torch import load_file, save_file
from torch import Tensor, float32, from_numpy
from torch.testing import assert_close
from worker_settings import needed

from pdserve.base.errors import ConfigError, DeviceError, InvariantError
from pdserve.base.ids import PageId
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult, Targets
from pdserve.executor import followers, loading, local, rank_process
from pdserve.executor.executor import Executor
from pdserve.executor.rank_frames import Step, plan_of, step_of
from pdserve.executor.threads import given_environment
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.pooling import Pooling
from pdserve.settings.config import WorkerConfig
from pdserve.worker.boot import build_engine, open_model
from pdserve.worker.server import ending_on_broken_device

TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
BY = (TENSOR, *long(PIPELINE))
SHAPE = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WHOLE = Share((0, 2), (0, 4))
PLAN = StepPlan((Chunk(tuple(range(5)), 0, (PageId(3),), (spec(),)), Chunk((7, 8), 0, (PageId(1),), (spec(), spec()))))
WRONG = replace(spec(), params=replace(spec().params, logit_bias=((10**6, 1.0),)))  # cannot be sampled
POOLINGS = (Pooling("logits", (3, 9)), Pooling("last"), Pooling("mean"))
SCORED = StepPlan((Chunk((1, 2, 3), 0, (PageId(5),), (), targets=Targets((2, 3), 2)),))
VECTORS = StepPlan(tuple([Chunk((1, 2, 3), 0, (PageId(i),), (), pooling=of) for i, of in enumerate(POOLINGS)]))


def config_of(folder: Path, size: int = 2, by: str = TENSOR, **settings: object) -> WorkerConfig:
    model = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "max_position_embeddings": 64, **SHAPE}
    (folder / "config.json").write_text(json.dumps(model))
    own = {"num_pages": 8, "load_format": "dummy", "dtype": "float32", by: size}
    return WorkerConfig.model_validate({**needed(folder), **own, **settings})


@contextmanager
def executor_of(config: WorkerConfig) -> Iterator[Executor]:
    with engine_of(config) as engine:
        yield engine.executor


def with_guesses(executor: Executor) -> list[int]:
    """Return what follows a prompt, once it has come one by one and as guesses, of which the last is wrong."""

    def after(tokens: tuple[int, ...], start: int, num_drafts: int = 0) -> list[int]:
        phase = Phase.DECODE if start else Phase.PROMPT
        chunk = Chunk(tokens, start, (PageId(6),), (spec(),), phase, num_drafts=num_drafts)
        ((gained,),) = executor.start(StepPlan((chunk,))).result(60).tokens
        return [token.token_id for token in gained]

    (first,) = after((1, 2, 3), 0)
    (second,) = after((first,), 3)
    (third,) = after((second,), 4)
    assert after((first, second, (third + 1) % 17), 3, num_drafts=2) == [second, third]
    return [first, second, third]


def lose_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be on a machine without a compiler."""
    monkeypatch.setenv("CC", "/nonexistent")  # of other ranks
    for module in ("executor.form", "executor.rank_sums", "executor.followers", "model.loading", "engine.runner"):
        monkeypatch.setattr(f"pdserve.{module}.library", lambda: Missing(Reason.COMPILER, "none"))


@pytest.mark.parametrize(
    ("by", "memory"), long_but(((TENSOR, "own"), (PIPELINE, "shared")), product((TENSOR, PIPELINE), ("shared", "own")))
)
def test_two_ranks_compute_what_one_does_and_leave_no_process(tmp_path: Path, by: str, memory: str) -> None:
    found, vectors, scored, guessed = [], [], [], []
    for size in (1, 2):
        with executor_of(config_of(tmp_path, size, by, rank_memory=memory)) as executor:
            assert len(ranks()) == size - 1
            first = executor.start(PLAN)
            copied = executor.start(StepPlan((Chunk((9,), 5, (PageId(4),), (spec((1,)),)),), ((PageId(3), PageId(4)),)))
            vectors.append([np.frombuffer(each, "<f4") for each in executor.start(VECTORS).result(60).pooled.values()])
            guessed.append(with_guesses(executor))
            (scores,) = executor.start(SCORED).result(60).prompts.values()
            scored.append(scores)
            tokens = tokens_of(first.result(60)), tokens_of(copied.result(60))
            parts = pages_of(executor, WHOLE)
            assert len(parts) == (size if memory == "own" else 1)
            found.append((*tokens, [whole_page(parts, page) for page in (1, 3, 4)]))
    (one, two) = found
    assert one[:2] == two[:2]
    assert all(abs(a - b).max() < 1e-6 for a, b in zip(one[2], two[2], strict=True))
    assert guessed[0] == guessed[1]
    assert scored[0].top_ids == scored[1].top_ids
    assert abs(np.frombuffer(scored[0].chosen, "<f4") - np.frombuffer(scored[1].chosen, "<f4")).max() < 1e-5
    assert [len(each) for each in vectors[0]] == [2, 32, 32]
    assert all(abs(a - b).max() < 1e-6 for a, b in zip(*vectors, strict=True))


@pytest.mark.long
def test_the_memory_of_the_pages_of_each_rank_is_taken_while_the_worker_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []
    monkeypatch.setattr(local, "take_in_background", taken.append)
    with executor_of(config_of(tmp_path, rank_memory="own", num_pages=8192)) as executor:
        executor.take_memory()
        (own,) = [(pages.data_ptr(), pages.nbytes) for pages in taken]
        assert own == (executor.region.address, executor.region.view.nbytes)
        (rank,) = ranks()
        before, (_, other) = rank.memory_info().rss, pages_of(executor, WHOLE)
        num_bytes = other.there.num_pages * other.there.page_bytes
        until(lambda: rank.memory_info().rss - before > 0.9 * num_bytes)


@pytest.mark.parametrize(("by", "has_library"), [(TENSOR, True), *long((TENSOR, False), (PIPELINE, True))])
def test_a_step_that_fails_where_others_wait_is_a_broken_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, has_library: bool
) -> None:
    if not has_library:
        lose_library(monkeypatch)

    class Failing(Runner):
        def run(self, plan: StepPlan) -> StepResult:
            raise ZeroDivisionError(plan.num_tokens)

    monkeypatch.setattr(loading, "Runner", Failing)
    with (
        executor_of(config_of(tmp_path, by=by)) as executor,
        pytest.raises(DeviceError, match="ZeroDivisionError: 7; then: rank 1: it waits"),
    ):
        executor.start(PLAN).result(60)


@pytest.mark.parametrize("by", BY)
def test_a_request_that_cannot_be_sampled_fails_alone(tmp_path: Path, by: str) -> None:
    plan = StepPlan((PLAN.chunks[0], replace(PLAN.chunks[1], samples=(WRONG,))))
    with executor_of(config_of(tmp_path, by=by)) as executor:
        result = executor.start(plan).result(60)
        alone = executor.start(StepPlan(plan.chunks[:1])).result(60)
    assert list(result.failed) == [1]
    assert tokens_of(result)[0] == tokens_of(alone)[0]


@pytest.mark.parametrize("family", ["qwen3.5", *long("lfm2", "falcon-h1")])
@pytest.mark.parametrize("has_library", [True, *long(False)])
def test_two_ranks_keep_the_states_of_one_also_behind_a_step_that_fails_and_behind_wrong_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, has_library: bool
) -> None:
    if not has_library:
        lose_library(monkeypatch)
    model = write_model(family, tmp_path / "model")
    found: list[tuple[list[int], list[int], Tensor]] = []
    for size in (1, 2):
        with executor_of(config_of(tmp_path, size, model=str(model), load_format="auto")) as executor:

            def after(
                executor: Executor, tokens: tuple[int, ...], start: int, num_drafts: int = 0, *, fails: bool = False
            ) -> list[int]:
                phase = Phase.DECODE if start else Phase.PROMPT
                pages = {"pages": (PageId(6),), "other_pages": ((PageId(2),),)}
                chunk = Chunk(tokens, start, samples=(spec(),), phase=phase, num_drafts=num_drafts, **pages)
                other = Chunk((7, 8), 0, (PageId(1),), (WRONG,), other_pages=((PageId(4),),))
                result = executor.start(StepPlan((chunk, other)[: 1 + fails])).result(60)
                assert list(result.failed) == [1] * fails
                return [token.token_id for token in result.tokens[0][0]]

            answer = after(executor, tuple(range(20, 28)), 0)
            for place in range(8, 12):
                answer += after(executor, (answer[-1],), place, fails=place == 10)
            gained = after(executor, (answer[-1], (answer[-2] + 1) % 512, 7), 12, num_drafts=2)
            kept = after(executor, (gained[-1],), 12 + len(gained))
            pages = from_numpy(executor.region.view.copy()).view(float32)
            found.append((answer, gained + kept, pages))
    assert found[0][:2] == found[1][:2]
    assert_close(found[1][2], found[0][2], atol=1e-4, rtol=1e-4)
    assert found[0][2][[2, 6]].any(1).all()


@pytest.mark.long
@pytest.mark.parametrize("by", BY)
def test_a_prompt_whose_vector_is_not_finite_fails_alone_on_two_ranks(tmp_path: Path, by: str) -> None:
    folder = write_model("llama3", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with executor_of(config_of(tmp_path, by=by, model=str(folder), load_format="auto")) as executor:
        expected = tokens_of(executor.start(StepPlan(PLAN.chunks[:1])).result(60))
        for pooling in POOLINGS:
            wrong = Chunk((7, 8), 0, (PageId(1),), (), pooling=pooling)
            result = executor.start(StepPlan((PLAN.chunks[0], wrong))).result(60)
            assert result.failed == {1: "ArithmeticError: a prompt's vector is not finite"}
            assert tokens_of(result)[:1] == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quantization": "int8"}, r"mlp\.gate_proj\.weight: 32 in units of 32 cannot be split over 2 ranks"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size: 8: 4 heads, 4 of them of keys"),
        ({TENSOR: 1, PIPELINE: 3}, "pipeline_parallel_size: 3: the model has 2 layers"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path, settings: dict[str, object], problem: str) -> None:
    shape = {"intermediate_size": 32, "hidden_size": 64}
    config = config_of(tmp_path, **settings)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | shape))
    with pytest.raises(ConfigError, match=problem), executor_of(config):
        pass


@pytest.mark.parametrize("device", ["cuda", "interpreter"])
def test_stages_on_devices_are_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match=f"{PIPELINE}: 2 is served on CPUs, not on {device}"):
        config_of(tmp_path, by=PIPELINE, device=device)


def test_stages_of_several_ranks_each_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size: 2 is not served with tensor_parallel_size 2 yet"):
        config_of(tmp_path, tensor_parallel_size=2, by=PIPELINE)


def test_stages_on_a_machine_without_a_compiler_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_library(monkeypatch)
    config = config_of(tmp_path, by=PIPELINE)
    with (
        pytest.raises(ConfigError, match="pipeline_parallel_size: 2: pipeline stages need the compiled C library"),
        executor_of(config),
    ):
        pass


def test_a_rank_is_told_all_of_a_step_but_what_rank_0_alone_does() -> None:
    targets = Targets((5, 6), 3)
    pages, others = (PageId(3), PageId(4)), ((PageId(7),), (PageId(9), PageId(8)))
    chunk = Chunk((1, 2, 3), 4, pages, (spec(), spec()), Phase.DECODE, None, targets, 2, others, pooling=POOLINGS[0])
    chunk = replace(chunk, following=9)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(step_of(StepPlan((chunk,)))), type=Step)
    (told,) = plan_of(sent).chunks
    assert [len(told.samples), told.phase, told.num_drafts, told.start] == [2, Phase.DECODE, 2, 4]
    assert (tuple(told.token_ids), tuple(told.pages)) == ((1, 2, 3), pages)
    assert tuple(map(tuple, told.other_pages)) == others
    assert (told.pooling, told.following) == (POOLINGS[0], 9)
    assert told.targets is not None
    assert tuple(told.targets.token_ids) == (5, 6)
    known = {"token_ids", "start", "pages", "samples", "phase", "targets", "num_drafts", "other_pages", "pooling"}
    of_rank_0 = {"adapter", "draft", "continues"}  # the last where layers keep a state, which ranks refuse
    launched = msgspec.msgpack.encode(step_of(StepPlan((Chunk((0,), 4, pages, (spec(),), Phase.DECODE, 2),))))
    (ahead,) = plan_of(msgspec.msgpack.decode(launched, type=Step)).chunks
    assert (told.previous, ahead.previous) == (None, 2)
    known |= {"previous", "following"}
    with pytest.raises(InvariantError, match="an adapter"):
        step_of(StepPlan((replace(chunk, adapter=b"of an adapter"),)))
    assert {field.name for field in fields(Chunk)} == known | of_rank_0, "what does a rank need of the new field?"


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "problem"),
    [(TENSOR, "rank 1: it took no part in a sum for 1 s"), (PIPELINE, "pipeline stage 0: it took no part in a step")],
)
def test_a_rank_that_hangs_in_a_step_is_a_broken_device(tmp_path: Path, by: str, problem: str) -> None:
    with executor_of(config_of(tmp_path, by=by, stalled_step_s=1.0)) as executor:
        executor.start(PLAN).result(60)
        (rank,) = ranks()
        rank.suspend()
        with pytest.raises(DeviceError, match=f"{problem}.*; then: rank 1: it waits"):
            executor.start(PLAN).result(60)


@pytest.mark.long
@pytest.mark.parametrize("by", BY)
def test_a_rank_that_is_frozen_for_a_while_computes_the_same_step(tmp_path: Path, by: str) -> None:
    with executor_of(config_of(tmp_path, by=by)) as executor:
        before = tokens_of(executor.start(PLAN).result(60))
        (rank,) = ranks()
        rank.suspend()
        running = executor.start(PLAN)
        with pytest.raises(TimeoutError):
            running.result(0.5)
        rank.resume()
        assert tokens_of(running.result(60)) == before


@pytest.mark.long
def test_ranks_of_a_machine_without_a_compiler_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_of(config_of(tmp_path)) as executor:
        expected = tokens_of(executor.start(PLAN).result(60)), with_guesses(executor)
    lose_library(monkeypatch)
    with executor_of(config_of(tmp_path)) as executor:
        assert (tokens_of(executor.start(PLAN).result(60)), with_guesses(executor)) == expected


class Watching(Runner):
    """The last of two stages: its part of a step in page 3 ends once the first stage has computed page 5."""

    def run(self, plan: StepPlan) -> StepResult:
        try:
            return super().run(plan)
        finally:
            if any(chunk.pages[0] == 3 for chunk in plan.chunks):
                until(lambda: self.kv[5, 0].any() or None)
                assert not self.kv[5, 1].any()


def test_the_first_stage_computes_a_known_step_while_the_last_one_computes_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [StepPlan((Chunk((1, 2, 3), 0, (PageId(page),), (spec(),)),)) for page in (3, 5)]
    monkeypatch.setattr(loading, "Runner", Watching)
    with executor_of(config_of(tmp_path, by=PIPELINE)) as executor:
        steps = [executor.start(plan) for plan in plans]
        first, second = (tokens_of(step.result(60)) for step in steps)
        assert first == second


@pytest.mark.long
def test_a_stage_that_has_begun_a_step_ahead_is_known_to_be_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `close` would wait for one that is stuck."""
    were_waiting, end = list[bool](), followers.Followers.end

    def noted_end(told: followers.Followers, limit_s: float | None = None) -> list[int]:
        were_waiting.append(told.are_waiting)
        return end(told, limit_s)

    monkeypatch.setattr(loading, "Runner", Watching)
    with executor_of(config_of(tmp_path, by=PIPELINE)) as executor:
        monkeypatch.setattr(followers.Followers, "end", noted_end)
        plans = [StepPlan((Chunk((1, 2, 3), 0, (PageId(page),), (spec(),)),)) for page in (3, 5)]
        for step in [executor.start(plan) for plan in plans]:
            step.result(60)
    assert were_waiting == [False, False]


@pytest.mark.long
def test_a_step_that_fails_behind_another_one_is_a_broken_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [StepPlan((Chunk((1, 2, 3), 0, (PageId(page),), (WRONG,)),)) for page in (3, 5)]
    monkeypatch.setattr(loading, "Runner", Watching)
    with executor_of(config_of(tmp_path, by=PIPELINE)) as executor:
        first, _ = (executor.start(plan) for plan in plans)
        with pytest.raises(DeviceError, match="a step has failed that other pipeline stages have left behind"):
            first.result(60)


def test_a_device_that_breaks_before_the_loop_is_there_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(DeviceError), ending_on_broken_device():
        raise DeviceError("rank 1: its process has ended")
    assert ended == [DEVICE_EXIT_STATUS]


def test_a_rank_that_does_not_load_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "LOAD_S", 0.05)  # less than it takes to start Python
    config = config_of(tmp_path)
    with pytest.raises(DeviceError, match="rank 1: it waits for another one, or is stopped"), executor_of(config):
        pass


@pytest.mark.parametrize("first_has_library", [True, *long(False)])
def test_ranks_of_which_one_alone_has_the_compiled_library_do_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_has_library: bool
) -> None:
    others = {**given_environment(), "CC": "/nonexistent"} if first_has_library else given_environment()
    if not first_has_library:
        lose_library(monkeypatch)
    monkeypatch.setattr(rank_process, "given_environment", lambda: others)
    problem = f"rank 1: RuntimeError: rank 0 has {'a' if first_has_library else 'no'} compiled library"
    with pytest.raises(DeviceError, match=problem), executor_of(config_of(tmp_path)):
        pass


def test_what_only_another_rank_finds_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    checkpoint = open_model(config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises((ConfigError, DeviceError), match=r"config\.json|rank 1: \w+Error"):
        build_engine(config, checkpoint, b"secret", lambda _: None)
    assert not ranks()
