"""Speculative decoding is configured with vLLM's keys, and refused where nobody verifies guesses."""

import json
from pathlib import Path

import pytest
from engine_answers import written
from model_zoo import write_model
from worker_settings import built, settings_of

from pdserve.base.errors import ConfigError
from pdserve.engine.guesses import AnswerLookup, DraftsBy, NgramLookup
from pdserve.executor import draft_loading, loading
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import WorkerConfig

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
DRAFT = '{"method": "draft_model", "model": "x"}'
HEAD = DRAFT.replace("draft_model", "eagle3")
MTP = '{"method": "mtp"}'
OWN_RANKS: dict[str, object] = {"tensor_parallel_size": 2, "rank_memory": "own"}


def worker(tmp_path: Path, given: object, **settings: object) -> WorkerConfig:
    return settings_of(tmp_path, **{"num_pages": 40, "dtype": "float32", "speculative_config": given, **settings})


SUFFIX = '{"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 7}'


@pytest.mark.parametrize(
    ("given", "lookup"), [(NGRAM, NgramLookup(3, 5)), (SUFFIX, NgramLookup(2, 24, AnswerLookup(24, 7, 0.1, 1.0)))]
)
def test_a_worker_guesses_as_its_configuration_says(tmp_path: Path, given: str, lookup: NgramLookup) -> None:
    config = worker(write_model("llama3", tmp_path), given)
    assert config == worker(tmp_path, json.loads(given))
    engine = built(config)
    engine.executor.close()
    limits = engine.scheduler.limits
    assert (limits.num_speculative_tokens, limits.guesser) == (4, lookup)


@pytest.mark.parametrize(
    ("given", "settings", "problem"),
    [
        ("{", {}, "--speculative-config: is no JSON"),
        ('{"method": "medusa"}', {}, r"--speculative-config\.method: 'medusa' is refused"),
        ('{"method": "eagle3"}', {}, r"--speculative-config\.model: method eagle3 needs it"),
        ('{"num_speculative_tokens": 16}', {}, r"--speculative-config\.num-speculative-tokens: 16 is refused"),
        ('{"model": "x"}', {}, r"--speculative-config\.model: goes with method draft_model"),
        ('{"method": "draft_model"}', {}, r"--speculative-config\.model: method draft_model needs it"),
        (DRAFT[:-1] + ', "num_speculative_tokens": 16}', {}, r"num-speculative-tokens: 16 is refused"),
        (DRAFT[:-1] + ', "prompt_lookup_min": 2}', {}, r"prompt-lookup-min: goes with method ngram"),
        ('{"method": "suffix", "prompt_lookup_min": 2}', {}, r"prompt-lookup-min: goes with method ngram"),
        ('{"suffix_decoding_min_token_prob": 0.5}', {}, r"min-token-prob: goes with method suffix, not with ngram"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', {}, r"max-tree-depth: 1 is refused"),
        (DRAFT[:-1] + ', "quantization": "int8"}', {}, r"--speculative-config\.quantization: unknown key"),
        (DRAFT, {"kv_cache_dtype": "fp8_e4m3"}, r"speculative_config\.method: draft_model is not served"),
        *(
            (given, {**OWN_RANKS, **settings}, f"speculative_config.method: {method} is not served with {beside} yet")
            for given, method in ((HEAD, "eagle3"), (MTP, "mtp"))
            for settings, beside in (
                ({}, "rank_memory own by several ranks on CPUs"),
                ({"nnodes": 2, "device": "interpreter"}, "ranks on several machines"),
            )
        ),
        (DRAFT, {"pipeline_parallel_size": 2}, "speculative_config: pipeline stages"),
        *(
            (
                given,
                {"device": "cuda", "attention_backend": "flashinfer"},
                "attention_backend: flashinfer is not served",
            )
            for given in (HEAD, MTP)
        ),
        ('{"prompt_lookup_min": 9}', {}, "prompt-lookup-min: 9 is over prompt_lookup_max 8"),
        (NGRAM, {"pipeline_parallel_size": 2}, "speculative_config: pipeline stages"),
    ],
)
def test_what_no_worker_does_is_refused_by_its_key(
    tmp_path: Path, given: str, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker(tmp_path, given, **settings)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_layers_that_keep_a_state_verify_guesses(tmp_path: Path, method: str) -> None:
    target, draft = (write_model(family, tmp_path / family) for family in ("lfm2", "llama3"))
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True, allowed_token_ids=(9, 10, 11))
    given = {"method": method, **({"model": str(draft)} if method == "draft_model" else {"prompt_lookup_min": 1})}
    tokens, num_guesses = written(target, params, speculative_config={**given, "num_speculative_tokens": 5})
    assert (tokens, 0) == written(target, params)
    assert num_guesses > 5


def drafting(target: Path, draft: Path, **settings: object) -> WorkerConfig:
    return worker(target, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5}, **settings)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_on_the_first_of_several_ranks_changes_no_token(tmp_path: Path, temperature: float) -> None:
    target = write_model("llama3", tmp_path)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    given = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 5}
    tokens, num_guesses = written(target, params, speculative_config=given, tensor_parallel_size=2)
    assert (tokens, 0) == written(target, params)
    assert num_guesses > 5


def test_a_draft_model_guesses_up_to_its_own_length_and_that_of_the_worker(tmp_path: Path) -> None:
    target, draft = (write_model(family, tmp_path / family) for family in ("llama3", "qwen2"))
    for max_model_len, longest in ((None, 600), (500, 500)):
        (draft / "config.json").write_text(json.dumps({**read(draft), "max_position_embeddings": 600}))
        config = drafting(target, draft, max_model_len=max_model_len, num_pages=64)
        engine = built(config)
        engine.executor.close()
        limits = engine.scheduler.limits
        assert (limits.num_speculative_tokens, limits.guesser) == (5, DraftsBy(DraftSource.DRAFT_MODEL, longest))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("lfm2", "states"),
        ("deepseek-v2", "latent rows"),
        ("llama4", "attention that torch computes"),
        ("ministral3", "queries that grow"),
        ("gemma4-shared", "heads of two sizes"),
        ("gemma2", "windows"),
        ("mistral", "windows"),
        ("mixtral", "experts"),
    ],
)
def test_models_that_nobody_has_seen_draft_are_refused(tmp_path: Path, family: str, kind: str) -> None:
    target, draft = (write_model(each, tmp_path / each) for each in ("llama3", family))
    config = drafting(target, draft)
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: {draft} has {kind}"):
        built(config)


def test_a_draft_model_that_cannot_be_read_is_named_by_its_own_key(tmp_path: Path) -> None:
    target, draft = write_model("llama3", tmp_path / "target"), write_model("qwen2", tmp_path / "draft")
    (draft / "config.json").write_text(json.dumps({**read(draft), "num_attention_heads": "four"}))
    for model in (draft, tmp_path / "nowhere"):
        config = drafting(target, model)
        with pytest.raises(ConfigError, match=rf"^speculative_config\.model: .*{model.name}"):
            built(config)


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    target, draft = (write_model("llama3", tmp_path / each) for each in ("target", "draft"))
    config = drafting(target, draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = list(vocab)[40:42]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: {draft} has other tokens"):
        built(config)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target, draft = (
        write_model("llama3", tmp_path / "target"),
        write_model("llama3", tmp_path / "draft", vocab_size=520),
    )
    config = drafting(target, draft)
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: {draft} has 520 tokens"):
        built(config)


def test_memory_that_the_draft_model_lacks_is_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (write_model("llama3", tmp_path / each) for each in ("target", "draft"))
    config = drafting(target, draft)
    pool_bytes = 40 * 16 * 3 * 2 * 2 * 16 * 4  # pages, tokens, layers, K and V, heads, features, bytes
    for module in (loading, draft_loading):
        monkeypatch.setattr(module, "available_bytes", lambda: 2 * pool_bytes)
    with pytest.raises(ConfigError, match=rf"speculative_config\.model: .* and {pool_bytes} are left"):
        built(config)


def read(model: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((model / "config.json").read_text())
    return config
