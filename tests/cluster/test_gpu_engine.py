"""Workers that run the GPU's engine, in Triton's interpreter, hand off and answer as transformers does."""

from pathlib import Path

from live_cluster import greedy, is_idle, live_cluster
from model_zoo import FAMILIES, VOCAB, first_disagreement, load_oracle, write_model

FLAGS = (
    *("--prefill", "1", "--decode", "1", "--dtype", "float32", "--device", "interpreter"),
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--num-pages", "32", "--max-model-len", "128"),
)


def test_the_gpus_engine_serves_behind_a_hand_off(tmp_path: Path) -> None:
    model = write_model(next(iter(FAMILIES)), tmp_path / "model", num_hidden_layers=2)
    oracle = load_oracle(model)
    prompts = [[3 + (7 * i + j) % (VOCAB - 3) for j in range(length)] for i, length in enumerate((20, 70))]
    with live_cluster(tmp_path, model, *FLAGS) as cluster:
        answers = cluster.generate_all([greedy(prompt, 6) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ledger.handoff_bytes > 0
            assert first_disagreement(oracle, prompt, answer.tokens[0]) is None
        layouts = [worker.registration.layout for worker in cluster.status().workers]
        assert [layout.page_digest for layout in layouts] == ["splitmix64", "splitmix64"]
        cluster.wait_for(is_idle, 10)
