"""A worker keeps K and V in a byte a value where its configuration says so, and nobody is served who was not tried."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from model_zoo import write_model
from typer.testing import CliRunner
from worker_settings import built, settings_of

from pdserve.base.errors import ConfigError, ProtocolError
from pdserve.base.ids import Incarnation, Peer
from pdserve.cli.app import app
from pdserve.executor.footprint import footprint_of
from pdserve.kvtransfer.session import Hello, Introduction, check_hello
from pdserve.protocol.kvlayout import KvCode, KvLayout
from pdserve.settings.config import WorkerConfig

MEMORY = 2**20


def worker(tmp_path: Path, asked: str, **settings: object) -> WorkerConfig:
    own = {"kv_cache_memory_bytes": MEMORY, "dtype": "float32", "kv_cache_dtype": asked}
    return settings_of(tmp_path, **{**own, **settings})


def layout_of(config: WorkerConfig) -> tuple[KvLayout, int]:
    """Return how a worker's pages lie, and how many it has."""
    engine = built(config)
    engine.executor.close()
    region = engine.executor.region
    assert region.view.shape == (engine.scheduler.cache.pool.num_pages, engine.layout.page_bytes)
    return engine.layout, len(region.view)


@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_pages_are_smaller_and_more_of_them_fit(tmp_path: Path, code: KvCode) -> None:
    write_model("qwen3", tmp_path)
    (plain, few), (coded, many) = layout_of(worker(tmp_path, "auto")), layout_of(worker(tmp_path, code))
    assert coded.dtype == code
    assert coded.page_bytes * 32 * 4 == plain.page_bytes * (32 + 4)  # heads of 32 values, in 4 bytes each
    assert (few, many) == (MEMORY // plain.page_bytes, MEMORY // coded.page_bytes)
    assert coded.weights_hash == plain.weights_hash


@pytest.mark.parametrize("by", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_models_check_counts_these_bytes(tmp_path: Path, code: KvCode, by: dict[str, int]) -> None:
    write_model("gemma3", tmp_path)
    plain, coded = (
        footprint_of(tmp_path, device="cpu", dtype="float32", kv_cache_dtype=asked, **by) for asked in ("auto", code)
    )
    assert coded.kv_dtype == code
    assert coded.token_bytes * 4 * 32 == plain.token_bytes * (32 + 4)
    assert coded.num_tokens > 3 * plain.num_tokens
    layout, _ = layout_of(worker(tmp_path, code))
    assert (layout.token_bytes, layout.page_bytes) == (coded.token_bytes, coded.page_bytes)


def test_models_check_takes_the_flag(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    said = CliRunner().invoke(app, ["models", "check", str(tmp_path), "--kv-cache-dtype", "int8"])
    assert said.exit_code == 0, said.output
    assert "int8: 432 a token" in said.stdout  # 3 layers, K and V, 2 heads, 32 codes and a scale


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"device": "cuda", "tensor_parallel_size": 2, "nnodes": 2},
            "nnodes: 2 is not served with kv_cache_dtype int8 on cuda yet",
        ),
        (
            {"device": "interpreter", "tensor_parallel_size": 2, "speculative_config": '{"method": "ngram"}'},
            r"speculative_config\.method: ngram is not served with kv_cache_dtype int8 by ranks with devices yet",
        ),
        ({"device": "cuda", "attention_backend": "flashinfer"}, "kv_cache_dtype: int8 is not served with attention_b"),
    ],
)
def test_what_no_worker_does_so_is_refused_by_its_key(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        worker(tmp_path, "int8", **settings)


@pytest.mark.parametrize(("asked", "problem"), [("fp8", "'fp8' is refused"), ("fp8_e5m2", "'fp8_e5m2' is refused")])
def test_other_types_are_refused(tmp_path: Path, asked: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"kv-cache-dtype: {problem}"):
        worker(tmp_path, asked)


@pytest.mark.parametrize(
    ("family", "kept", "size"),
    [
        ("gemma4-shared", "heads of two sizes", 1),
        ("deepseek-v3", "latent rows", 1),
        ("deepseek-v3", "latent rows", 2),
        ("gemma4", "heads of two sizes", 1),
        ("lfm2", "states", 1),
        ("llama4", "attention that torch computes", 1),
        ("llama4", "attention that torch computes", 2),
        ("ministral3", "queries that grow", 1),
        ("ministral3", "queries that grow", 2),
    ],
)
def test_models_that_keep_other_rows_are_refused(tmp_path: Path, family: str, kept: str, size: int) -> None:
    write_model(family, tmp_path)
    config = worker(tmp_path, "int8", tensor_parallel_size=size)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: int8 is not served for a model with {kept}"):
        built(config)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        footprint_of(tmp_path, device="cpu", dtype="float32", kv_cache_dtype="int8")


def test_a_gpus_pages_are_counted_with_these_bytes(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    given: dict[str, object] = {"device": "cuda", "dtype": "bfloat16"}
    plain, coded = (footprint_of(tmp_path, **given, kv_cache_dtype=code) for code in ("auto", "fp8_e4m3"))
    assert coded.kv_dtype == "fp8_e4m3"
    assert coded.page_bytes * 32 * 2 == plain.page_bytes * (32 + 4)
    ranked = footprint_of(tmp_path, **given, kv_cache_dtype="fp8_e4m3", tensor_parallel_size=2)
    assert ranked.rank_page_bytes * 2 == coded.page_bytes


@pytest.mark.parametrize(
    ("mine", "theirs", "problem"),
    [
        (("float32", "int8"), ("float32", "fp8_e4m3"), None),
        (("float32", "auto"), ("float32", "int8"), None),
        (("bfloat16", "auto"), ("float32", "auto"), "weights_hash: .* dtype float32 != .* dtype bfloat16"),
        (("float32", "fp8_e4m3"), ("bfloat16", "auto"), "weights_hash: .* dtype bfloat16 != .* dtype float32"),
        (("float32", "int8"), ("bfloat16", "int8"), "weights_hash: .* dtype bfloat16 != .* dtype float32"),
    ],
)
def test_pairs_of_unlike_rows_are_refused_only_where_they_compute_in_another_type(
    tmp_path: Path, mine: tuple[str, str], theirs: tuple[str, str], problem: str | None
) -> None:
    write_model("qwen3", tmp_path)
    (here, _), (there, _) = (layout_of(worker(tmp_path, asked, dtype=dtype)) for dtype, asked in (mine, theirs))
    peer = Peer("w", Incarnation(3))
    hello = Hello(Introduction(Peer("v", Incarnation(2)), there), "nixl", peer.incarnation, 1.0)
    with pytest.raises(ProtocolError, match=rf"layout\.{problem}") if problem else nullcontext():
        check_hello(hello, Introduction(peer, here), "nixl")
