"""One prefill and one decode worker with so few pages that a prompt fits only because its pages leave windows."""

import json
from pathlib import Path

import pytest
from live_cluster import greedy, is_idle, live_cluster
from model_zoo import first_disagreement, load_oracle, prompt, write_model

from pdserve.executor.layouts import describe_layout
from pdserve.model.config import ModelConfig
from pdserve.protocol.paging import PageOrder

LENGTH, CHUNK, PAGE_SIZE, NUM_TOKENS = 1200, 64, 16, 8
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-num-batched-tokens", str(CHUNK))


@pytest.mark.long
def test_long_prompts_of_a_model_with_windows_are_answered_in_few_pages(tmp_path: Path) -> None:
    """The hand-off sends as many bytes as the pages that later tokens see have. A prefix is found again."""
    model = write_model("gemma3", tmp_path / "model")
    config = ModelConfig.from_hf(json.loads((model / "config.json").read_text()))
    layout = describe_layout(config, "", PAGE_SIZE, "float32", "cpu")
    longest = LENGTH + 32
    num_pages = layout.paging.most_pages(longest, CHUNK) + 2
    assert num_pages < layout.paging.num_pages(LENGTH) // 2
    flags = ("--num-pages", str(num_pages), "--max-model-len", str(longest), "--max-num-seqs", "4")
    long = prompt(LENGTH)
    asked = [long, prompt(90, 1), prompt(LENGTH // 2, 2), [*long[:-20], *prompt(30, 3)]]
    with live_cluster(tmp_path, model, *FLAGS, *flags) as cluster:
        answers = cluster.generate_all([greedy(each, NUM_TOKENS) for each in asked[:3]])
        answers += [cluster.generate(greedy(asked[3], NUM_TOKENS))]
        cluster.wait_for(is_idle, 5)
    oracle = load_oracle(model)
    for each, answer in zip(asked, answers, strict=True):
        assert first_disagreement(oracle, each, answer.tokens[0]) is None
        assert len(answer.tokens[0]) == NUM_TOKENS
    for each, answer in zip(asked[:3], answers[:3], strict=True):
        sent = PageOrder(layout.paging, len(each)).count(len(each))
        assert answer.ledger.handoff_bytes == sent * layout.page_bytes
