"""`pdserve models check`: what it says of a model is what workers do with it."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from eagle3_heads import head_config, random_head, write_head
from model_zoo import STATES, write_model
from mtp_modules import PREFIX, write_model_with_module
from published_formats import published
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.executor import footprint, rank_sums
from pdserve.executor.footprint import footprint_of
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.groups import Groups
from pdserve.model.loading import needed_weights, ops_for
from pdserve.model.ops import weight_bytes
from pdserve.model.ops_cuda import CudaOps

Command = Callable[..., CompletedProcess[str]]
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("mistral", tmp_path_factory.mktemp("checked"))


def copied(folder: Path, to: Path, **config: object) -> Path:
    """Copy a model with other values in its config."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    told = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(told | config))
    return to


def test_figures_are_those_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = footprint_of(folder, dtype="float32", page_size=32)
    tensors = load_file(folder / "model.safetensors").values()
    assert fit.num_parameters == sum(tensor.numel() for tensor in tensors)
    assert fit.weight_bytes == 4 * fit.num_parameters
    assert fit.token_bytes == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, features, bytes
    assert (fit.page_bytes, set(fit.windows), fit.max_model_len) == (32 * fit.token_bytes, {96}, 4096)
    monkeypatch.setattr(footprint, "available_bytes", lambda: fit.weight_bytes + 256 * fit.page_bytes - 1)
    fits = footprint_of(folder, dtype="float32", page_size=32)
    assert (fits.num_pages, fits.num_tokens, fits.num_sequences) == (255, 255 * 32, 1)


def test_a_long_context_is_said_to_need_what_its_windows_promise(tmp_path: Path, pdserve: Command) -> None:
    """Half the layers see 128 tokens, as in GPT-OSS: about half of what all layers would need without windows."""
    kinds = ["sliding_attention", "full_attention"]
    shape = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 128, "max_position_embeddings": 131_072}
    folder = write_model("gemma2", tmp_path / "model", **shape)
    fit = footprint_of(folder, dtype="float32", page_size=16)
    whole = fit.max_model_len * fit.token_bytes
    assert 0.5 * whole < fit.sequence_bytes < 0.52 * whole
    assert fit.num_sequences == fit.num_pages // fit.sequence_pages
    said = pdserve("models", "check", str(folder), "--dtype", "float32").stdout
    windowed, full = fit.sequence_bytes / 2**20, whole / 2**20
    assert f"{windowed:.0f} MiB a sequence of full length, {full:.0f} MiB without windows" in said


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("int4", "bfloat16"), ("none", "bfloat16")])
def test_weights_take_the_bytes_that_they_are_said_to_take(folder: Path, quantization: str, dtype: str) -> None:
    fit = footprint_of(folder, dtype=dtype, quantization=quantization)

    def size(value: object) -> int:
        if isinstance(value, Groups):
            return value.nbytes
        assert isinstance(value, Tensor)
        return value.numel() * (2 if dtype == "bfloat16" else 4)

    weights = weights_in_form(open_checkpoint(folder), quantization)  # type: ignore[arg-type]
    assert fit.weight_bytes == sum(size(stored.read(())) for stored in weights.values())
    assert fit.num_parameters == sum(prod(stored.shape) for stored in weights.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("awq", "bfloat16"),
        ("int8", "bfloat16"),
        ("fp8 of blocks", "bfloat16"),
        pytest.param("fp8 of outputs", "float32", marks=LONG),  # on a CPU: decoded, since its products take bfloat16
        *(pytest.param(case, "bfloat16", marks=LONG) for case in ("words", "fp8 of outputs", "fp8 of large blocks")),
    ],
)
def test_codes_take_the_bytes_in_which_each_device_holds_them(case: str, dtype: str, tmp_path: Path) -> None:
    published(case, write_model("llama3", tmp_path / "plain", intermediate_size=256), tmp_path / "coded")
    checkpoint, cpu = open_checkpoint(tmp_path / "coded"), torch.device("cpu")
    asked = "auto" if dtype == "bfloat16" else checkpoint.coded_as
    for device, ops in (("cpu", ops_for(cpu, 16)), ("cuda", CudaOps())):
        fit = footprint_of(tmp_path / "coded", device=device, dtype=dtype, quantization=asked, page_size=64)
        form = choose_quantization(asked, checkpoint, dtype, device)  # type: ignore[arg-type]
        weights = needed_weights(checkpoint.config, weights_in_form(checkpoint, form, device))  # type: ignore[arg-type]
        model = Decoder.build(checkpoint.config, Tensors(weights, getattr(torch, dtype), cpu), ops)
        matrices = {id(each): weight_bytes(each) for each in model.matrices()}.values()
        norms = sum(prod(stored.shape) for stored in weights.values() if len(stored.shape) == 1)
        assert fit.weight_bytes == sum(matrices) + norms * getattr(torch, dtype).itemsize


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM"),
        ({"router_aux_loss_of_mine": 3}, "router_aux_loss_of_mine"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
    ],
)
def test_what_is_not_served_is_named(
    folder: Path, tmp_path: Path, pdserve: Command, config: dict[str, object], named: str
) -> None:
    model = copied(folder, tmp_path / "model", **config)
    said = pdserve("models", "check", str(model), "--json")
    assert said.returncode == 1
    assert named in json.loads(said.stdout)["refused"]


def test_a_tensor_of_another_shape_is_named(folder: Path, tmp_path: Path, pdserve: Command) -> None:
    model = copied(folder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, model / "model.safetensors")
    said = pdserve("models", "check", str(model))
    assert (said.returncode, said.stdout.split(":")[0]) == (1, "not served")
    assert f"{name}: shape (64, 159), the config asks for (64, 160)" in said.stdout


def test_a_served_model_is_told_in_lines(folder: Path, pdserve: Command) -> None:
    said = pdserve("models", "check", str(folder), "--dtype", "float32")
    assert said.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in said.stdout.splitlines() if not line.startswith("KV bytes"))
    assert lines["family"] == "MistralForCausalLM: served"
    assert lines["KV"] == "3 layers of 2 heads of 16; a query sees the last 96 tokens"
    assert lines["chat"] == "not served: the model has no chat template"


def test_what_a_gpus_worker_refuses_is_not_said_to_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: cuda does not serve this model: its kernels have no windows that"):
        footprint_of(write_model("llama4", tmp_path), device="cuda", dtype="bfloat16")


@pytest.mark.parametrize("family", STATES)
def test_a_model_with_states_is_counted_for_a_gpu_with_pages_that_its_kernels_have(tmp_path: Path, family: str) -> None:
    folder = write_model(family, tmp_path)
    fits = [footprint_of(folder, device=device, dtype="bfloat16") for device in ("cpu", "cuda")]
    assert len({fit.state_bytes for fit in fits}) == 1
    for fit in fits:
        assert fit.page_bytes >= fit.state_bytes > 0
    (size,) = fits[1].page_sizes
    assert size >= fits[0].page_sizes[0]
    assert size & (size - 1) == 0 or size % 128 == 0


def test_a_model_is_counted_for_a_gpu_where_there_is_none(folder: Path, pdserve: Command) -> None:
    said = pdserve("models", "check", str(folder), "--device", "cuda", "--dtype", "bfloat16")
    assert said.returncode == 0
    if not torch.cuda.is_available():
        assert "this cuda     there is none here" in said.stdout


def test_what_fits_on_ranks_with_gpus_is_what_fits_on_each(
    tmp_path: Path, pdserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
    model = write_model("llama3", tmp_path, **heads)
    one: dict[str, object] = {"device": "cuda", "dtype": "bfloat16"}
    two = {**one, "tensor_parallel_size": 2}
    monkeypatch.setattr(footprint, "_free_bytes", lambda _: 2**20)
    alone, ranked = footprint_of(model, **one), footprint_of(model, **two)
    assert ranked.rank_page_bytes * 3 == alone.page_bytes * 2, "two of three KV heads"
    assert ranked.num_pages == (2**20 - ranked.rank_weight_bytes) // ranked.rank_page_bytes > alone.num_pages
    coded = footprint_of(model, **two, quantization="int8")
    assert coded.rank_weight_bytes < ranked.rank_weight_bytes
    sizes = ("--tensor-parallel-size", "9", "--quantization", "int8")
    refused = pdserve("models", "check", str(model), "--device", "cuda", "--dtype", "bfloat16", *sizes).stdout
    problem = "160 in units of 32 cannot be split over 9 ranks"
    assert f"not served: model.layers.0.mlp.gate_proj.weight: {problem}" in refused
    windows, latents = (footprint_of(write_model(name, tmp_path / name), **two) for name in ("gemma3", "deepseek-v2"))
    assert windows.rank_page_bytes * 2 == windows.page_bytes
    assert latents.rank_page_bytes == latents.page_bytes, "each rank has all rows"


def test_the_weights_of_the_largest_stage_are_those_of_its_layers_and_of_the_head(
    folder: Path, pdserve: Command
) -> None:
    tensors = load_file(folder / "model.safetensors")
    behind = ("model.layers.1.", "model.layers.2.", "model.norm.", "lm_head.")  # of three layers
    own = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(behind))
    fit = footprint_of(folder, dtype="float32", pipeline_parallel_size=2)
    assert fit.rank_weight_bytes == pytest.approx(4 * own, abs=4)
    said = pdserve("models", "check", str(folder), "--dtype", "float32", "--pipeline-parallel-size", "2").stdout
    assert "stages        2: at most" in said
    refused = pdserve("models", "check", str(folder), "--pipeline-parallel-size", "4").stdout
    assert "not served: pipeline_parallel_size: 4: the model has 3 layers" in refused


def guessing(**given: object) -> dict[str, object]:
    return {"dtype": "float32", "speculative_config": json.dumps(given)}


def test_a_draft_model_is_counted_with_its_weights_and_its_own_pages(
    tmp_path: Path, pdserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("llama3", tmp_path / "model")
    draft = write_model("llama3", tmp_path / "draft", num_hidden_layers=2)
    plain, fit = (
        footprint_of(model, dtype="float32"),
        footprint_of(model, **guessing(method="draft_model", model=str(draft))),
    )
    assert (fit.weight_bytes, fit.page_bytes) == (plain.weight_bytes, plain.page_bytes)
    assert fit.draft_weight_bytes == sum(tensor.nbytes for tensor in load_file(draft / "model.safetensors").values())
    assert fit.draft_page_bytes == fit.page_bytes * 2 // 3
    held, each = fit.weight_bytes + fit.draft_weight_bytes, fit.page_bytes + fit.draft_page_bytes
    monkeypatch.setattr(footprint, "available_bytes", lambda: held + 9 * each - 1)
    assert footprint_of(model, **guessing(method="draft_model", model=str(draft))).num_pages == 8
    given = json.dumps({"method": "draft_model", "model": str(draft)})
    said = pdserve("models", "check", str(model), "--dtype", "float32", "--speculative-config", given).stdout
    weights, own = f"{fit.draft_weight_bytes / 2**20:.0f} MiB of weights", f"{fit.draft_page_bytes:,} bytes a page"
    assert f"draft_model: about {weights} in memory and {own}" in said


@pytest.mark.parametrize("given", ['{"method": "suffix"}', "null"])
def test_guesses_that_are_looked_up_have_no_weights(folder: Path, pdserve: Command, given: str) -> None:
    said = pdserve("models", "check", str(folder), "--speculative-config", given).stdout
    assert "this cpu" in said
    assert "guesses" not in said


def test_a_refusal_names_no_flag_that_was_not_given(folder: Path, pdserve: Command) -> None:
    guesses = "--speculative-config", '{"method": "ngram"}'
    said = pdserve("models", "check", str(folder), "--pipeline-parallel-size", "2", *guesses).stdout
    assert said == "not served: speculative_config: pipeline stages verify no guesses yet\n"


def test_a_head_is_counted_with_its_weights_and_a_layer_more_in_each_page(tmp_path: Path) -> None:
    model = write_model("llama3", tmp_path / "model")
    config = head_config(json.loads((model / "config.json").read_text()), 200, (0, 1, 2))
    tensors = random_head(config)
    head = write_head(tmp_path / "head", config, tensors)
    plain, fit = (
        footprint_of(model, dtype="float32"),
        footprint_of(model, **guessing(method="eagle3", model=str(head))),
    )
    assert fit.draft_weight_bytes == sum(each.nbytes for name, each in tensors.items() if name not in ("d2t", "t2d"))
    assert fit.page_bytes == plain.page_bytes * 4 // 3
    assert (fit.draft_page_bytes, fit.num_parameters, fit.windows) == (0, plain.num_parameters, plain.windows)


def test_a_module_is_counted_beside_its_model(tmp_path: Path) -> None:
    model = write_model_with_module("glm4-moe", tmp_path)
    plain, fit = footprint_of(model, dtype="float32"), footprint_of(model, **guessing(method="mtp"))
    own = [each for name, each in load_file(model / "model.safetensors").items() if name.startswith(PREFIX)]
    copies = [each for each in own if len(each) == 512]  # of embedding and head, which it shares
    assert len(copies) == 2
    assert fit.draft_weight_bytes == sum(each.nbytes for each in own) - sum(each.nbytes for each in copies)
    assert (fit.weight_bytes, fit.page_bytes) == (plain.weight_bytes, plain.page_bytes * 4 // 3)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"method": "ngram", "model": "x"}, "-config.model: goes with"),
        ({"method": "mtp"}, "speculative_config.method: mtp: modules were tested of"),
        ({"method": "eagle3", "model": "nowhere"}, "speculative_config.model: "),
    ],
)
def test_guesses_that_a_worker_would_refuse_are_refused_by_the_same_key(
    folder: Path, given: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        footprint_of(folder, **guessing(**given))


def test_stages_are_not_served_without_the_compiled_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sums, "library", lambda: Missing(Reason.COMPILER, ""))
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        footprint_of(folder, pipeline_parallel_size=2)


def test_own_memory_of_ranks_is_refused_as_workers_refuse_it(tmp_path: Path, pdserve: Command) -> None:
    llama, states = write_model("llama3", tmp_path / "llama"), write_model("lfm2", tmp_path / "states")
    blocks, own = write_model("llama4", tmp_path / "blocks"), ("--rank-memory", "own", "--tensor-parallel-size", "2")
    said = [pdserve("models", "check", str(model), *own).stdout for model in (llama, states, blocks)]
    assert "2: at most" in said[0]
    assert "2: at most" in said[1]
    assert said[2] == "not served: rank_memory: own is not served for a model with attention that torch computes\n"
    assert footprint_of(states, rank_memory="own").state_bytes == footprint_of(states).state_bytes
    coded = footprint_of(llama, rank_memory="own", tensor_parallel_size=2, kv_cache_dtype="int8")
    assert coded.page_bytes == 3 * 2 * 2 * 16 * (16 + 4)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pages_that_each_rank_has_a_copy_of_take_the_memory_of_all_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    def pages_of(memory: str) -> int:
        given = {"rank_memory": memory, "tensor_parallel_size": 4, "kv_cache_dtype": kv_dtype}
        fit = footprint_of(folder, **given)
        monkeypatch.setattr(footprint, "available_bytes", lambda: fit.weight_bytes + 100 * fit.page_bytes)
        return footprint_of(folder, **given).num_pages

    found = [pages_of(memory) for memory in ("shared", "own")]
    assert found == [100, 50], "two ranks have the same KV head"


def test_of_ranks_on_several_machines_is_said_what_each_machine_holds(
    tmp_path: Path, pdserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("llama3", tmp_path, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    own = {"dtype": "float32", "rank_memory": "own"}
    monkeypatch.setattr(footprint, "available_bytes", lambda: 2**22)
    here, apart = (footprint_of(model, **own, tensor_parallel_size=4, nnodes=nodes) for nodes in (1, 2))
    assert (apart.num_alike, apart.rank_page_bytes * 4) == (2, here.page_bytes)
    assert apart.num_pages == (2**22 - 2 * apart.rank_weight_bytes) // (here.page_bytes // 2) > 2 * here.num_pages
    coded = footprint_of(model, **own, tensor_parallel_size=4, nnodes=2, kv_cache_dtype="int8")
    assert coded.rank_page_bytes * 4 * 16 == apart.rank_page_bytes * (16 + 4)
    flags = ("--tensor-parallel-size", "2", "--nnodes", "2")
    said, refused = (
        pdserve("models", "check", str(model), *flags, *more).stdout for more in (("--rank-memory", "own"), ())
    )
    assert "machines      2: at most" in said
    assert "free: beside the weights on each of 2 like it KV of" in said
    assert refused == "not served: nnodes: 2 needs rank_memory own: machines share no memory\n"
    for degrees, problem in (
        ({"tensor_parallel_size": 3, "nnodes": 2}, "tensor_parallel_size 3 gives them different"),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, "stages"),
    ):
        with pytest.raises(ConfigError, match=f"nnodes: 2.* {problem}"):
            footprint_of(model, **own, **degrees)


def test_a_tied_head_is_in_the_memory_of_two_stages(tmp_path: Path) -> None:
    folder = write_model("llama3", tmp_path, tie_word_embeddings=True)
    (table,) = [value for name, value in load_file(folder / "model.safetensors").items() if "embed_tokens" in name]
    one, stages = (footprint_of(folder, dtype="float32", pipeline_parallel_size=size) for size in (1, 2))
    norm = table.shape[1]  # is on both as well
    assert stages.weight_bytes - one.weight_bytes == pytest.approx(4 * (table.numel() + norm), abs=4)
