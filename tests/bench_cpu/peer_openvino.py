"""Serves a benchmark's workloads with OpenVINO GenAI: a JSON object a line in, one with the seconds it took out.

Runs in a virtual environment with openvino-genai, without pdserve. Usage: peer_openvino.py MODEL_DIR
"""

import json
import os
import random
import sys
import time
from typing import IO

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 2
STEP_TOKENS = 2048
MOST_SEQUENCES = 64


def open_pipeline(path: str) -> object:
    """Load the model, with OMP_NUM_THREADS threads or one for each processor."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = MOST_SEQUENCES
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    settings = {"INFERENCE_NUM_THREADS": num_threads}
    return openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)


def config_of(asked: dict[str, float], number: int) -> object:
    """Return how a request is sampled, with a seed of its own."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = int(asked["output_tokens"])
    config.ignore_eos = True
    config.do_sample = asked["temperature"] != 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = asked["temperature"], asked["top_p"], number
    return config


def say(answers: IO[str], answer: dict[str, float]) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Load the model, say so, then time each workload."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    pipeline = open_pipeline(sys.argv[1])
    rng = random.Random(0)
    say(answers, {})
    for line in sys.stdin:
        asked = json.loads(line)
        count, length = asked["num_requests"], asked["prompt_tokens"]
        prompts = [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [config_of(asked, number) for number in range(count)]
        began_s = time.perf_counter()
        results = pipeline.generate(ids, configs)
        seconds = time.perf_counter() - began_s
        if any(len(result.m_generation_ids[0]) != asked["output_tokens"] for result in results):
            raise SystemExit("an answer has another length than was asked for")
        say(answers, {"seconds": seconds})


if __name__ == "__main__":
    main()
