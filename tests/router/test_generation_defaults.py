"""What a request leaves out is as the model's publisher recommends; what it says counts."""

import json
from pathlib import Path

import pytest
from router_fakes import StartRouter, collect, error_of, tokens_in

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import GenerationDefaults
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.served import load_model

PUBLISHED = GenerationDefaults(
    max_tokens=20, temperature=0.25, top_k=40, top_p=0.5, min_p=0.125, repetition_penalty=1.25
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 100,
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
VOCAB = {"a": 0, "b": 1, "c": 2, "<end>": 3}
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": VOCAB, "merges": []}, "decoder": BYTE_LEVEL}


async def sent(start_router: StartRouter, defaults: GenerationDefaults, **asked: object) -> inference.SamplingParams:
    """Return what a worker is told of a request."""
    router = await start_router(defaults=defaults)
    prefill, _ = await router.pair()
    await collect(router.generate(text="a", **asked))
    return prefill.prefills[0].spec.sampling


async def test_fields_left_out_are_the_publishers(start_router: StartRouter) -> None:
    told = await sent(start_router, PUBLISHED)
    assert (told.max_tokens, told.temperature, told.top_k, told.top_p) == (20, 0.25, 40, 0.5)
    assert (told.min_p, told.repetition_penalty, told.frequency_penalty) == (0.125, 1.25, 0.0)


async def test_fields_a_request_says_are_its_own_even_where_they_are_zero(start_router: StartRouter) -> None:
    asked = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 3}
    told = await sent(start_router, PUBLISHED, **asked)
    assert {name: getattr(told, name) for name in asked} == asked


async def test_without_a_published_config_the_apis_defaults_hold(start_router: StartRouter) -> None:
    told = await sent(start_router, GenerationDefaults())
    assert (told.max_tokens, told.temperature, told.top_k, told.top_p) == (16, 1.0, 0, 1.0)
    assert (told.min_p, told.repetition_penalty) == (0.0, 1.0)


async def test_the_publishers_most_new_tokens_limit_every_answer(start_router: StartRouter) -> None:
    router = await start_router(defaults=GenerationDefaults(max_tokens=5))
    await router.pair()
    assert len(tokens_in(await collect(router.generate(text="a", max_tokens=30)))) == 5
    assert len(tokens_in(await collect(router.generate(text="a", max_tokens=3)))) == 3


async def test_an_answer_of_no_said_length_is_cut_to_the_room_beside_its_prompt(start_router: StartRouter) -> None:
    router = await start_router(defaults=GenerationDefaults(max_tokens=2000))
    await router.pair()  # workers of 2,048 tokens
    assert len(tokens_in(await collect(router.generate(text="x" * 2040)))) == 8
    _, message = await error_of(router.generate(text="x" * 2040, max_tokens=9))
    assert message.startswith("max_tokens: 2040 prompt tokens and max_tokens 9 are 2049 together")
    _, message = await error_of(router.generate(text="x" * 2040, min_tokens=9))
    assert message.startswith("min_tokens: 2040 prompt tokens and min_tokens 9 are 2049 together")


async def test_a_prompt_that_leaves_no_room_for_an_answer_of_no_said_length_is_named(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    for length in (2048, 2049):
        sampling = inference.SamplingParams(fill_model_len=True)
        call = router.inference.Generate(inference.GenerateRequest(text="x" * length, sampling=sampling))
        _, message = await error_of(call)
        limit = "this model's maximum context length is 2048 tokens (max_model_len)"
        alone = f"prompt: it alone has {length} tokens, which leaves no room for an answer"
        assert message == f"{alone if length == 2048 else 'text: 2049 characters are at least 2049 tokens'}; {limit}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's files without weights, which a router does not read."""
    files = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
    for name, content in (files | {"generation_config.json": {"temperature": 0.5, "top_k": 50}}).items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def defaults_of(model: Path, secret_file: Path, **settings: object) -> GenerationDefaults:
    config = RouterConfig.model_validate({"model": str(model), "secret_file": secret_file, **settings})
    return load_model(config).defaults


def test_a_router_reads_the_models_generation_config_unless_told_otherwise(model: Path, secret_file: Path) -> None:
    assert defaults_of(model, secret_file) == GenerationDefaults(temperature=0.5, top_k=4)
    assert defaults_of(model, secret_file, generation_config="vllm") == GenerationDefaults()


def test_a_generation_config_that_cannot_be_followed_is_named_at_the_start(model: Path, secret_file: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p: 7\.0 is outside"):
        defaults_of(model, secret_file)
    assert defaults_of(model, secret_file, generation_config="vllm") == GenerationDefaults()
