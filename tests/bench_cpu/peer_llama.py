"""Serves a benchmark's workloads with llama.cpp: a JSON object a line comes in, one with the seconds it took goes out.

Runs in a virtual environment with llama-cpp-python, or with ik-llama-cpp-python, whose bindings are nearly the same,
and without pdserve. Usage: peer_llama.py FILE.gguf
"""

import ctypes
import json
import os
import random
import sys
import time
from typing import IO

import numpy as np

try:
    import llama_cpp
except ImportError:
    from ik_llama_cpp import _ctypes_api as llama_cpp  # which has no samplers

BATCH_TOKENS = 2048
ROUNDED_TO = 256  # tokens of a sequence in a context


def open_model(path: str) -> object:
    """Load the model."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    if hasattr(params, "repack_tensors"):  # ik_llama.cpp does it only if it is asked to
        params.repack_tensors, params.use_mmap = True, False
    return llama_cpp.llama_model_load_from_file(path.encode(), params)


def context_for(model: object, asked: dict[str, float]) -> object:
    """Return a context with a KV cache for each sequence, and OMP_NUM_THREADS threads or one for each processor."""
    num_requests, length = int(asked["num_requests"]), int(asked["prompt_tokens"] + asked["output_tokens"])
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = num_requests * -(-length // ROUNDED_TO) * ROUNDED_TO
    params.n_batch, params.n_seq_max = BATCH_TOKENS, num_requests
    if hasattr(params, "kv_unified"):
        params.kv_unified = False
    if hasattr(params, "mla_attn"):  # ik_llama.cpp
        params.flash_attn = num_requests == 1  # with several sequences in a batch it fails: "GGML_ASSERT(S > 0)"
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    params.n_threads = params.n_threads_batch = num_threads
    return llama_cpp.llama_init_from_model(model, params)


def sampler_of(asked: dict[str, float], number: int) -> object:
    """Return a chain that samples as asked, with a seed of the request's own; None where there are no samplers."""
    if not hasattr(llama_cpp, "llama_sampler_chain_init"):
        if asked["temperature"] != 0:
            raise SystemExit("ik_llama.cpp's bindings have no samplers: --samplings greedy")
        return None
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if asked["temperature"] == 0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        return chain
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(asked["top_p"], 1))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(asked["temperature"]))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(number))
    return chain


class Run:
    """Sequences that are computed together."""

    def __init__(self, context: object, vocab_size: int, asked: dict[str, float]) -> None:
        self._context = context
        self._vocab_size = vocab_size
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._samplers = [sampler_of(asked, number) for number in range(int(asked["num_requests"]))]

    def close(self) -> None:
        """Free what the library holds for the run."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        for sampler in self._samplers:
            if sampler is not None:
                llama_cpp.llama_sampler_free(sampler)

    def compute(self, tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decode (token, position, sequence, is sampled), in batches; return the tokens sampled, by sequence."""
        sampled = {}
        for begin in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[begin : begin + BATCH_TOKENS]
            batch = self._batch
            batch.n_tokens = len(part)
            for place, (token, position, sequence, is_sampled) in enumerate(part):
                batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
                batch.seq_id[place][0], batch.logits[place] = sequence, int(is_sampled)
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for place, (_, _, sequence, is_sampled) in enumerate(part):
                if is_sampled:
                    sampled[sequence] = self._chosen(sequence, place)
        return sampled

    def _chosen(self, sequence: int, place: int) -> int:
        if self._samplers[sequence] is not None:
            return int(llama_cpp.llama_sampler_sample(self._samplers[sequence], self._context, place))
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def timed(model: object, asked: dict[str, float], prompts: list[list[int]]) -> float:
    """Return the seconds until all prompts are answered."""
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    run = Run(context_for(model, asked), vocab_size, asked)
    began_s = time.perf_counter()
    length = int(asked["prompt_tokens"])
    first = [
        (token, place, number, place == length - 1)
        for number, prompt in enumerate(prompts)
        for place, token in enumerate(prompt)
    ]
    last = run.compute(first)
    for step in range(int(asked["output_tokens"]) - 1):
        last = run.compute([(token, length + step, number, True) for number, token in last.items()])
    seconds = time.perf_counter() - began_s
    run.close()
    return seconds


def say(answers: IO[str], answer: dict[str, float]) -> None:
    """Write one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Load the model, say so, then time each workload."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    if hasattr(llama_cpp, "llama_log_set"):
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = open_model(sys.argv[1])
    rng = random.Random(0)
    say(answers, {})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [
            [rng.randrange(100, 40000) for _ in range(asked["prompt_tokens"])] for _ in range(asked["num_requests"])
        ]
        say(answers, {"seconds": timed(model, asked, prompts)})


if __name__ == "__main__":
    main()
