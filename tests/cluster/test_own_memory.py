"""Workers whose ranks have memory of their own hand off to workers of other degrees, as one rank with all would."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import moving
import psutil
import pytest
from live_cluster import Answer, LiveCluster, all_ready, greedy, is_idle, live_cluster, load_of
from looking import until
from model_zoo import UNEVEN, assert_right, first_disagreement, load_oracle, prompt, write_model
from transformers import PreTrainedModel

OWN = (
    "--rank-memory",
    "own",
    "--dtype",
    "float32",
    "--max-num-batched-tokens",
    "128",
    "--num-gpu-blocks-override",
    "500",
)
LENGTHS = (1, 16, 40, 130, 300)
ANSWER = 8  # tokens
OVER_TCP = ("--page-size", "16", "--handoff-transport", "tcp")  # writes need the receiver's help
# Ranks of a busy machine take long to start again, and to compute while a test freezes the worker of the other pool.
PATIENT = ("--pool-grace-s", "120", "--worker-silence-s", "30")


@dataclass(frozen=True)
class Copied:
    """A prompt, and a model and workers of several ranks for it."""

    name: str
    num_tokens: int
    num_pages: int  # that a hand-off of the prompt sends
    shape: Mapping[str, object]
    flags: tuple[str, ...]
    family: str = "llama3"

    def model(self, folder: Path) -> Path:
        return write_model(self.family, folder / "model", **self.shape)


def heads(num_heads: int, head_dim: int, num_layers: int) -> Mapping[str, object]:
    alike = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    return {**alike, "head_dim": head_dim, "num_hidden_layers": num_layers}


# The KV, 31 MiB, is more than the sockets between two workers hold.
ON_CPUS = Copied("CPUs", 2000, 125, heads(8, 128, 2), ("--prefill-tp", "2", "--decode-pp", "2"))
TWO_AND_TWO = ("--prefill-tp", "2", "--decode-tp", "2")
# Of 80 tokens each in the layer that sees all, and of 16 in five layers with a window of 96 tokens.
WINDOWS = Copied("windows", 2400, 30 + 6, heads(8, 128, 6), TWO_AND_TWO, "gemma3")
# As much on each way; computed before a stream to the frozen receiver ends, so with few layers and heads.
ROWS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "kv_lora_rank": 504,
    "first_k_dense_replace": 4,
}
LATENTS = Copied("latents", 2000, 125, ROWS, TWO_AND_TWO, "deepseek-v3")
# Small, since Triton's interpreter computes it. The receiver acknowledges no byte meanwhile.
OF_TRITON = ("--device", "interpreter", "--tensor-parallel-size", "2", "--max-num-seqs", "2")
ON_DEVICES = Copied("devices", 48, 3, heads(4, 32, 1), OF_TRITON)
Writing = tuple[grpc.Call, Answer, str]
EACH = pytest.mark.parametrize("copied", [ON_CPUS, WINDOWS, LATENTS, ON_DEVICES], ids=lambda copied: copied.name)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    return load_oracle(model)


def ranks_of(cluster: LiveCluster, name: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.pid_of(name)).children()
    return [each for each in children if "pdserve.executor.rank" in each.cmdline()]


def meet(cluster: LiveCluster, num_prefills: int) -> None:
    """Let each prefill worker hand off once: afterwards it can write at once."""
    cluster.wait_for(all_ready(num_prefills + 1), 60)
    for seed in range(num_prefills):
        cluster.generate(greedy(prompt(20, seed), 2))
    cluster.wait_for(is_idle, 5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill", "decode", "lengths"),
    [
        ("tp 1", "tp 2", (1, 16, 40)),
        ("tp 1", "tp 2", LENGTHS),
        ("tp 2", "tp 1", LENGTHS),
        ("tp 2", "tp 2", LENGTHS),
        ("pp 1", "pp 2", LENGTHS),
        ("pp 2", "tp 2", LENGTHS),
        ("pp 2", "pp 2", LENGTHS),
    ],
)
def test_pairs_of_ranks_with_memory_of_their_own_answer_as_transformers_does(
    model: Path, oracle: PreTrainedModel, prefill: str, decode: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    sizes = (flag for role, of in (("prefill", prefill), ("decode", decode)) for flag in f"--{role}-{of}".split())
    assert_hands_off(model, oracle, (*sizes, *OWN), lengths, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "page_size"),
    [("3", "1", (9, 3), 16), ("1", "3", (9, 3), 32), ("2", "4", (8, 4), 32), ("4", "2", (8, 4), 16)],
)
def test_more_ranks_hand_off_to_fewer_and_fewer_to_more(
    prefill: str, decode: str, heads: tuple[int, int], page_size: int, tmp_path: Path
) -> None:
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 64, "hidden_size": 144}
    model = write_model("llama3", tmp_path / "model", **shape)
    sizes = ("--prefill-tp", prefill, "--decode-tp", decode, "--page-size", str(page_size))
    assert_hands_off(model, load_oracle(model), (*sizes, *OWN), (1, 40, 130), tmp_path)


def assert_hands_off(
    model: Path, oracle: PreTrainedModel, flags: tuple[str, ...], lengths: tuple[int, ...], folder: Path
) -> None:
    """Have a cluster answer prompts of these lengths, after a hand-off each, and then one that begins with the last."""
    with live_cluster(folder, model, *flags) as cluster:
        asked = [prompt(length, length) for length in lengths]
        answers = cluster.generate_all([greedy(each, 24) for each in asked])
        cluster.wait_for(is_idle, 5)
        again = [*asked[-1], *answers[-1].tokens[0], 7, 8]
        answers.append(cluster.generate(greedy(again, 24)))
        for each, answer in zip([*asked, again], answers, strict=True):
            assert_right(oracle, each, answer.tokens[0], 24)
            assert answer.ledger.handoff_bytes > 0
        assert answers[-1].ledger.handoff_pages_reused > 0
        status = cluster.wait_for(is_idle, 5)
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("gpt-oss", "1", "2"),
        ("gpt-oss", "2", "1"),
        ("gpt-oss", "2", "2"),
        ("gemma3", "1", "2"),
        ("gemma3", "2", "1"),
        ("gemma3", "2", "2"),
        ("gemma3", "4", "1"),  # of two KV heads
        ("deepseek-v3", "2", "2"),
        ("deepseek-v3", "1", "2"),
        ("deepseek-v3", "2", "1"),
        ("llama3", "4", "2"),
        ("llama3", "1", "4"),
        ("bamba", "1", "2"),
        ("falcon-h1", "1", "2"),
        ("granite-hybrid", "2", "2"),
        ("lfm2", "2", "1"),
        ("lfm2-moe", "1", "2"),
        ("qwen3-next", "1", "2"),
        ("qwen3.5", "1", "2"),
        ("qwen3.5", "2", "1"),
        ("qwen3.5-moe", "2", "2"),
    ],
)
def test_ranks_answer_as_transformers_does_with_windows_states_and_copies_of_latent_rows_or_heads(
    family: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    shape = UNEVEN if family == "gemma3" else {}
    model, sizes = write_model(family, tmp_path / "model", **shape), ("--prefill-tp", prefill, "--decode-tp", decode)
    assert_hands_off(model, load_oracle(model), (*sizes, *OWN), (40, 300), tmp_path)


@contextmanager
def copying(cluster: LiveCluster, copied: Copied, asked: list[int], num_prefills: int = 1) -> Iterator[Writing]:
    """Ask for an answer whose pages are on their way throughout the block: no rank of the receiver reads what comes.

    Yields the call, the answer with its first token, and the name of the worker whose ranks write.
    """
    with cluster.frozen(*[f"prefill-{number}" for number in range(num_prefills)]):
        call = cluster.start(greedy(asked, ANSWER))
        status = cluster.wait_for(lambda status: load_of(status, "decode-0").pages_granted == copied.num_pages, 20)
    (writer,) = [w.registration.worker_id for w in status.workers if w.num_assigned and w.load.pages_granted == 0]
    answer = Answer()
    with stopped(*processes_of(cluster, "decode-0")):
        answer.add(next(call))
        yield call, answer, writer


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def processes_of(cluster: LiveCluster, name: str) -> list[psutil.Process]:
    """Return the processes of all ranks of a worker, in their order."""
    return [psutil.Process(cluster.pid_of(name)), *ranks_of(cluster, name)]


@pytest.mark.long
@EACH
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends_while_pages_are_copied_ends_its_worker_and_its_prompts_are_placed_again(
    tmp_path: Path, victim: int, copied: Copied
) -> None:
    """Whichever it is, the other one ends as well, before the next process of their worker is started."""
    model, asked = copied.model(tmp_path), prompt(copied.num_tokens, "killed")
    sizes = (*copied.flags, *OVER_TCP, *PATIENT)
    with live_cluster(tmp_path, model, *sizes, *OWN) as cluster:
        meet(cluster, 1)
        with copying(cluster, copied, asked) as (call, answer, writer):
            ranks = processes_of(cluster, writer)
            ranks[victim].kill()
            until(lambda: cluster.state.pid_of(writer) not in (None, ranks[0].pid))
            assert not any(each.is_running() for each in ranks)
        answer.read(call)
        assert answer.ledger.attempts == 2
        status = cluster.wait_for(is_idle, 5)
    assert_right(load_oracle(model), asked, answer.tokens[0], ANSWER)
    assert load_of(status, "decode-0").num_digest_mismatches == 0


@pytest.mark.long
@EACH
@pytest.mark.parametrize("victim", [0, 1])
def test_a_receiver_that_ends_while_ranks_copy_to_its_ranks_is_copied_to_anew_once_it_is_back(
    tmp_path: Path, victim: int, copied: Copied
) -> None:
    model, asked = copied.model(tmp_path), prompt(copied.num_tokens, "receiver")
    sizes = (*copied.flags, *OVER_TCP, *PATIENT)
    with live_cluster(tmp_path, model, *sizes, *OWN) as cluster:
        meet(cluster, 1)
        with copying(cluster, copied, asked) as (call, answer, _):
            processes_of(cluster, "decode-0")[victim].kill()
        answer.read(call)
        assert answer.ledger.attempts in (2, 3), "one may fail before the router knows that the worker has ended"
        status = cluster.wait_for(is_idle, 5)
    assert_right(load_oracle(model), asked, answer.tokens[0], ANSWER)
    assert load_of(status, "prefill-0").pages_free == 500, (
        "nothing is in doubt once the receiver is known to have ended"
    )


@pytest.mark.long
@EACH
@pytest.mark.parametrize("frozen_rank", [0, 1])
def test_pages_that_a_frozen_rank_may_write_stay_in_quarantine_until_it_thaws(
    tmp_path: Path, frozen_rank: int, copied: Copied
) -> None:
    """If it is the first one the worker is silent, and its request placed again. Else the client leaves."""
    model, asked = copied.model(tmp_path), prompt(copied.num_tokens, "frozen")
    sizes = ("--prefill", "2", *copied.flags, *OVER_TCP, *PATIENT)
    with live_cluster(tmp_path, model, *sizes, *OWN) as cluster, ExitStack() as frozen:
        meet(cluster, 2)
        with copying(cluster, copied, asked, 2) as (call, answer, writer):
            frozen.enter_context(stopped(processes_of(cluster, writer)[frozen_rank]))
        if frozen_rank == 0:
            answer.read(call)
            assert answer.ledger.attempts == 2
            assert_right(load_oracle(model), asked, answer.tokens[0], ANSWER)
        else:
            call.cancel()
        cluster.wait_for(lambda status: load_of(status, "decode-0").pages_quarantined == copied.num_pages, 10)
        with pytest.raises(AssertionError, match="not within"):
            cluster.wait_for(lambda status: load_of(status, "decode-0").pages_quarantined < copied.num_pages, 6)
        frozen.close()
        status = cluster.wait_for(is_idle, 20)
        assert load_of(status, "decode-0").num_digest_mismatches == 0
        again = [cluster.generate(greedy(asked, ANSWER)) for _ in range(2)]
    assert all(first_disagreement(load_oracle(model), asked, each.tokens[0]) is None for each in again)


@pytest.mark.long
@EACH
def test_pages_that_a_frozen_rank_may_write_come_back_when_it_is_killed(tmp_path: Path, copied: Copied) -> None:
    model, asked = copied.model(tmp_path), prompt(copied.num_tokens, "frozen and killed")
    sizes = (*copied.flags, *OVER_TCP, *PATIENT)
    with live_cluster(tmp_path, model, *sizes, *OWN) as cluster:
        meet(cluster, 1)
        with copying(cluster, copied, asked) as (call, _, writer):
            (rank,) = ranks_of(cluster, writer)
            rank.suspend()
        call.cancel()
        cluster.wait_for(lambda status: load_of(status, "decode-0").pages_quarantined == copied.num_pages, 10)
        rank.kill()
        cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)
        answer = cluster.generate(greedy(asked, ANSWER))
    assert_right(load_oracle(model), asked, answer.tokens[0], ANSWER)


@pytest.mark.long
def test_a_running_answer_moves_between_a_worker_of_stages_and_one_of_ranks_with_memory_of_their_own(
    tmp_path: Path,
) -> None:
    own = {"decode-0": {"pipeline_parallel_size": 2}, "decode-1": {"tensor_parallel_size": 2}}
    moving.assert_an_answer_moves(tmp_path, own, rank_memory="own")


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_a_running_answer_with_windows_or_latent_rows_moves_between_workers_of_one_and_of_two_ranks(
    family: str, tmp_path: Path
) -> None:
    own, shape = {"decode-1": {"tensor_parallel_size": 2}}, {**moving.MODEL_SHAPE, "num_key_value_heads": 8}
    model = write_model(family, tmp_path / "model", **shape)
    moving.assert_an_answer_moves(tmp_path, own, model, rank_memory="own")
