"""Serves a benchmark's workloads with vLLM: a JSON object a line comes in, one with the seconds it took goes out.

Runs in vLLM's own virtual environment, without pdserve, in the type of weights that PEER_DTYPE names (bfloat16).
PEER_RUNNER=pooling: it makes vectors of the prompts. Usage: peer_vllm.py MODEL_DIR
"""

import json
import os
import random
import sys
import time
from typing import IO

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def say(answers: IO[str], answer: dict[str, float]) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Load the model, say so, then time each workload."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - its settings are read when it is imported

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    pools = os.environ.get("PEER_RUNNER") == "pooling"
    llm = LLM(
        model=sys.argv[1],
        dtype=os.environ.get("PEER_DTYPE", "bfloat16"),
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **({"runner": "pooling", "convert": "embed"} if pools else {}),
    )
    rng = random.Random(0)
    say(answers, {})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [
            {"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(asked["prompt_tokens"])]}
            for _ in range(asked["num_requests"])
        ]
        params = [
            SamplingParams(
                temperature=asked["temperature"],
                top_p=asked["top_p"],
                seed=number if asked["temperature"] else None,
                max_tokens=asked["output_tokens"] or None,
                ignore_eos=True,
            )
            for number in range(asked["num_requests"])
        ]
        began_s = time.perf_counter()
        if pools:
            llm.embed(prompts, use_tqdm=False)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        say(answers, {"seconds": time.perf_counter() - began_s})


if __name__ == "__main__":
    main()
