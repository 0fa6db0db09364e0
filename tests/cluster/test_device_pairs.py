"""Workers whose ranks have a device each hand off to one another, and exchange pages with ranks on CPUs."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from eagle3_heads import longest_walks, write_forgetful_model, write_head_that_looks_back
from equal_states import SHAPES
from live_cluster import Answer, greedy, is_idle, load_of
from model_zoo import assert_right, load_oracle, prompt, write_model
from moving import move, num_moved, num_tried
from published_formats import write_in_mxfp4
from transformers import PreTrainedModel
from wired_cluster import Pools, wired_cluster

ON_CPU: Mapping[str, object] = {}
ONE: Mapping[str, object] = {"device": "interpreter"}
TWO: Mapping[str, object] = {**ONE, "tensor_parallel_size": 2}
LAYERS: Mapping[str, object] = {"num_hidden_layers": 2}
# Pages of 8 and of 16 tokens, and a prompt may be longer than the window.
WINDOWS: Mapping[str, object] = {"num_hidden_layers": 2, "sliding_window": 24}
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 64, "dtype": "float32"}

MXFP4 = "gpt-oss in mxfp4"

pytestmark = pytest.mark.slow


def written(family: str, folder: Path, shape: Mapping[str, object]) -> tuple[Path, PreTrainedModel]:
    """Write a model; return it, and transformers' with its weights, or with what its codes stand for."""
    if family == MXFP4:
        decoded, coded = write_in_mxfp4(folder, intermediate_size=160, **shape)  # type: ignore[arg-type]
        return coded, load_oracle(decoded)
    model = write_model(family, folder, **shape)  # type: ignore[arg-type]
    return model, load_oracle(model)


@pytest.mark.parametrize(
    ("family", "shape", "prefills", "decodes"),
    [
        pytest.param("llama3", LAYERS, [ONE], [TWO], marks=pytest.mark.long),
        pytest.param("llama3", LAYERS, [ON_CPU, ONE, TWO], [ONE, TWO], marks=pytest.mark.long),
        pytest.param("llama3", LAYERS, [TWO], [ON_CPU], marks=pytest.mark.long),
        *[
            pytest.param(family, shape, [source], [target], marks=pytest.mark.long)
            for family, shape in (("gpt-oss", WINDOWS), ("deepseek-v3", LAYERS))
            for source, target in ((ONE, TWO), (TWO, ONE), (TWO, TWO))
        ],
        pytest.param(MXFP4, WINDOWS, [ONE], [TWO], marks=pytest.mark.long),
        *[
            pytest.param(family, SHAPES[family], [source], [target], marks=pytest.mark.long)
            for family, source, target in (("lfm2", ONE, TWO), ("qwen3.5", TWO, ONE), ("falcon-h1", TWO, TWO))
        ],
    ],
)
def test_ranks_with_devices_hand_off_to_other_degrees_and_exchange_pages_with_cpus(
    tmp_path: Path,
    family: str,
    shape: Mapping[str, object],
    prefills: list[Mapping[str, object]],
    decodes: list[Mapping[str, object]],
) -> None:
    model, oracle = written(family, tmp_path / "model", shape)
    pools = Pools(
        tuple(f"prefill-{i}" for i in range(len(prefills))), tuple(f"decode-{i}" for i in range(len(decodes)))
    )
    own = dict(zip(pools.prefills, prefills, strict=True)) | dict(zip(pools.decodes, decodes, strict=True))
    wanted, met = len(prefills) * len(decodes), set[tuple[str, str]]()
    flags, in_turn = {**SMALL, "rank_memory": "own"}, {"placement": "round_robin"}
    flags |= {"quantization": "mxfp4"} if family == MXFP4 else {}
    with wired_cluster(tmp_path, model, pools, flags, in_turn, own) as cluster:
        for length in (1, 16, 40, 60, 33, 7, 48, 17)[: 2 + wanted]:
            asked = prompt(length, length)
            answer = cluster.generate(greedy(asked, 8))
            assert_right(oracle, asked, answer.tokens[0], 8)
            assert answer.ledger.handoff_bytes > 0
            met.add((answer.ledger.prefill_worker, answer.ledger.decode_worker))
        status = cluster.wait_for(is_idle, 5)
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0
    assert len(met) == wanted


@pytest.mark.long
def test_a_running_answer_moves_between_workers_of_one_and_of_two_ranks_with_devices(tmp_path: Path) -> None:
    model, asked, num_tokens = write_model("llama3", tmp_path / "model", num_hidden_layers=1), prompt(20, "moves"), 90
    own, pools = {"decode-0": ONE, "decode-1": TWO}, Pools(("prefill-0",), ("decode-0", "decode-1"))
    with wired_cluster(tmp_path, model, pools, {**SMALL, "rank_memory": "own"}, own_flags=own) as cluster:
        answer, call = Answer(), cluster.start(greedy(asked, num_tokens))
        answer.add(next(call))
        status = cluster.wait_for(lambda status: any(load_of(status, name).num_running for name in pools.decodes), 5)
        source, target = sorted(pools.decodes, key=lambda name: -load_of(status, name).num_running)
        while not num_moved(status):  # at first the two have not met
            before = num_tried(status)
            assert move(cluster, source, target) == 1, "the answer has ended before"
            status = cluster.wait_for(lambda status, before=before: num_tried(status) > before, 20)
        answer.read(call)
        status = cluster.wait_for(is_idle, 5)
    assert answer.ledger.decode_worker == target
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0
    assert_right(load_oracle(model), asked, answer.tokens[0], num_tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"), [("llama3", {"num_hidden_layers": 1}), ("gpt-oss", WINDOWS), ("deepseek-v3", LAYERS)]
)
def test_what_ranks_with_devices_hold_of_an_answer_is_fetched_for_the_next_turn(
    family: str, shape: Mapping[str, object], tmp_path: Path
) -> None:
    model, pools = write_model(family, tmp_path / "model", **shape), Pools(("prefill-0",), ("decode-0",))
    own, flags = {"prefill-0": ONE, "decode-0": TWO}, {**SMALL, "rank_memory": "own"}
    with wired_cluster(tmp_path, model, pools, flags, {"placement": "goodput"}, own) as cluster:
        for turn in range(5):  # the router learns what computing costs
            asked = prompt(40, turn)
            before = cluster.generate(greedy(asked, 40))
            cluster.wait_for(is_idle, 10)
            asked += [*before.tokens[0], 7, 8]
            answer = cluster.generate(greedy(asked, 8))
            if answer.ledger.fetched_from:
                break
        status = cluster.wait_for(is_idle, 5)
    assert answer.ledger.fetched_from == "decode-0"
    assert answer.ledger.fetched_tokens >= 32
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0
    assert_right(load_oracle(model), asked, answer.tokens[0], 8)


@pytest.mark.long
@pytest.mark.parametrize(("method", "prefill"), [("ngram", ON_CPU), ("eagle3", ON_CPU), ("eagle3", TWO)], ids=str)
def test_ranks_with_devices_guess_behind_prompts_that_other_workers_computed(
    method: str, prefill: Mapping[str, object], tmp_path: Path
) -> None:
    """The head guesses what followed the same token before, and only the prompt has that."""
    tensors, pools = write_forgetful_model(tmp_path / "model"), Pools(("prefill-0",), ("decode-0",))
    guessed: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        guessed["model"] = str(write_head_that_looks_back(tmp_path / "head", tmp_path / "model", tensors))
    flags = {**SMALL, "rank_memory": "own", "speculative_config": json.dumps(guessed)}
    own, counts = {"prefill-0": prefill, "decode-0": {**TWO, "test_step_s": 1.0}}, [0, 0]  # more rows take no longer
    with wired_cluster(tmp_path, tmp_path / "model", pools, flags, own_flags=own) as cluster:
        for walk in longest_walks(tensors, 3):
            answer = cluster.generate(greedy([*walk * 2, walk[0]], 12))
            assert answer.tokens[0] == walk[1:13]
            assert answer.ledger.handoff_bytes > 0
            for each in answer.ledger.drafts.values():
                counts[0] += each.num_draft_tokens
                counts[1] += sum(each.num_accepted_tokens_per_pos)
        status = cluster.wait_for(is_idle, 5)
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0
    assert counts[1] > 0.9 * counts[0] > 0
