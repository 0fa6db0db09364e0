"""A cluster whose pages travel through torch.distributed answers as transformers does."""

from pathlib import Path

import pytest
from live_cluster import greedy, is_idle, live_cluster
from model_zoo import VOCAB, first_disagreement, load_oracle, write_model

FLAGS = ("--prefill", "1", "--decode", "1", "--dtype", "float32", "--mover", "collective")
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128")
INTERPRETED = ("--device", "interpreter", *SMALL)

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("flags", "num_prompts", "num_tokens", "family", "shape"),
    [
        pytest.param((), 8, 16, "llama3", {}, id="in place"),
        pytest.param(INTERPRETED, 3, 4, "llama3", {}, id="staged, as pages of a GPU"),
        pytest.param(INTERPRETED, 3, 4, "deepseek-v3", {"num_hidden_layers": 1}, id="staged, of latent rows"),
        pytest.param(INTERPRETED, 3, 4, "lfm2", {}, id="staged, with states"),
    ],
)
def test_answers_do_not_depend_on_what_carries_the_pages(
    tmp_path: Path, flags: tuple[str, ...], num_prompts: int, num_tokens: int, family: str, shape: dict[str, int]
) -> None:
    model = write_model(family, tmp_path / "model", **shape)
    oracle = load_oracle(model)
    prompts = [[3 + (7 * i + j) % (VOCAB - 3) for j in range(11 * i)] for i in range(1, num_prompts + 1)]
    with live_cluster(tmp_path, model, *FLAGS, *flags) as cluster:
        answers = cluster.generate_all([greedy(prompt, num_tokens) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ledger.handoff_bytes > 0
            assert first_disagreement(oracle, prompt, answer.tokens[0]) is None
        status = cluster.wait_for(lambda status: any(worker.pairs for worker in status.workers), 20)
        assert [pair.carrier for worker in status.workers for pair in worker.pairs] == ["tcp"]
        cluster.wait_for(is_idle, 10)
