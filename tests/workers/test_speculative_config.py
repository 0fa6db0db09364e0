"""Speculative decoding is configured with vLLM's keys, and refused where nobody verifies guesses."""

import json
from pathlib import Path

import pytest
from model_zoo import write_model

from pdserve.base.errors import ConfigError
from pdserve.engine.guesses import NgramLookup
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.worker.boot import build_engine, open_model

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'


def worker(tmp_path: Path, given: object, **settings: object) -> WorkerConfig:
    own = {"model": str(tmp_path), "secret_file": tmp_path / "secret", "role": "decode", "worker_id": "w"}
    fixed = {"routers": ("127.0.0.1:1",), "num_pages": 40, "dtype": "float32"}
    return load_config(WorkerConfig, flags={**own, **fixed, **settings, "speculative_config": given})


def test_a_worker_guesses_as_its_configuration_says(tmp_path: Path) -> None:
    config = worker(write_model("llama3", tmp_path), NGRAM)
    assert config == worker(tmp_path, json.loads(NGRAM))
    engine = build_engine(config, open_model(config), b"secret", lambda share: None)
    engine.executor.close()
    limits = engine.scheduler.limits
    assert (limits.num_speculative_tokens, limits.lookup) == (4, NgramLookup(3, 5))


@pytest.mark.parametrize(
    ("given", "settings", "problem"),
    [
        ("{", {}, "--speculative-config: is no JSON"),
        ('{"method": "eagle3"}', {}, r"--speculative-config\.method: 'eagle3' is refused"),
        ('{"num_speculative_tokens": 16}', {}, r"--speculative-config\.num-speculative-tokens: 16 is refused"),
        ('{"model": "x"}', {}, r"--speculative-config\.model: unknown key"),
        ('{"prompt_lookup_min": 9}', {}, "prompt-lookup-min: 9 is over prompt_lookup_max 8"),
        (NGRAM, {"device": "cuda"}, "speculative_config: device cuda"),
        (NGRAM, {"device": "interpreter"}, "speculative_config: device interpreter"),
        (NGRAM, {"tensor_parallel_size": 2}, "speculative_config: a worker of several ranks"),
    ],
)
def test_what_no_worker_does_is_refused_by_its_key(
    tmp_path: Path, given: str, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker(tmp_path, given, **settings)


def test_a_state_takes_no_guess_back(tmp_path: Path) -> None:
    config = worker(write_model("lfm2", tmp_path), NGRAM)
    with pytest.raises(ConfigError, match="speculative_config: this model's layers keep a state"):
        build_engine(config, open_model(config), b"secret", lambda share: None)
