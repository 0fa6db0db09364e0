"""Ranks with memory of their own draw the tokens of one rank, whatever pages of a model hold."""

from pathlib import Path

import pytest
from engine_runs import Asked, answers, engine_of, worker_config
from long_cases import long
from model_zoo import UNEVEN, prompt, write_model
from rank_pages import ranks

from pdserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TWO = SamplingParams(seed=3, temperature=1.2, n=2, max_tokens=4, ignore_eos=True)  # a page of each group is copied
SIZES = {"num_pages": 200, "max_model_len": 400}
ASKED: list[Asked] = [(prompt(250, 1), GREEDY), (prompt(5, 2), TWO), (prompt(100, 3), GREEDY)]
AGAIN: list[Asked] = [([*prompt(250, 1), 7, 8], GREEDY)]  # behind pages that are cached


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("gpt-oss", 2),
        *long(("gemma3", 2), ("gemma3", 4), ("deepseek-v2", 2), ("deepseek-v3", 2), ("glm4-lite", 2)),
        *long(("llama3", 4)),  # of two KV heads
    ],
)
def test_ranks_with_memory_of_their_own_draw_the_tokens_of_one_rank_that_has_all(
    family: str, size: int, tmp_path: Path
) -> None:
    folder, found = write_model(family, tmp_path, **(UNEVEN if family == "gemma3" else {})), []
    for settings in ({}, {"rank_memory": "own"}, {"rank_memory": "own", "tensor_parallel_size": size}):
        with engine_of(worker_config(folder, **{**SIZES, **settings})) as engine:
            assert len(ranks()) == int(str(settings.get("tensor_parallel_size", 1))) - 1
            first, second = answers(engine, ASKED, 1), answers(engine, AGAIN, 1)
            assert second.num_cached >= 192
            found.append((first.texts, second.texts))
    assert found[1] == found[0]
    assert found[2] == found[0]
