"""A worker left to choose computes in bfloat16 where its device multiplies that, else in float32, and says why."""

import json
from pathlib import Path

import pytest
import torch
from long_cases import long
from model_zoo import write_model
from published_formats import published
from pydantic import ValidationError
from worker_settings import built, needed

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import ChosenQuantization, choose_quantization, weights_in_form
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.executor import form
from pdserve.executor.layouts import page_digest
from pdserve.kernels.cpu.layers import BFLOAT16_BITS, Tiles
from pdserve.kernels.tuning import Device as Chip
from pdserve.model.decoder import Decoder
from pdserve.model.family import Model, Tensors
from pdserve.model.loading import load_model, ops_for
from pdserve.model.ops_cuda import CudaOps
from pdserve.settings import processor
from pdserve.settings.config import Device, Dtype, WorkerConfig
from pdserve.settings.processor import choose_dtype, read_cpu_info
from pdserve.worker.boot import open_model

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

ZEN_5 = "processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 svm\n\nprocessor\t: 1\nflags\t\t: fpu avx512_bf16\n"
SAPPHIRE_RAPIDS = "flags\t\t: fpu avx512f amx_bf16 avx512_bf16 amx_tile amx_int8\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16 dgh\nCPU implementer\t: 0x41\n"
ZEN_3 = "flags\t\t: fpu avx avx2\nbugs\t\t: bf16 amx_bf16\nvmx flags\t: avx512_bf16\n"
ICE_LAKE = "flags\t\t: fpu avx avx2 avx512f avx512_vnni\n"
SANDY_BRIDGE = "flags\t\t: fpu avx\n"
GRAVITON_2 = "Features\t: fp asimd dcpop asimddp\n"
ONE_OF_TWO = "flags\t\t: fpu avx512_bf16\n\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("cpu_info", "dtype", "because"),
    [
        (ZEN_5, "bfloat16", "this processor has avx512_bf16"),
        (SAPPHIRE_RAPIDS, "bfloat16", "this processor has amx_bf16"),
        (GRAVITON_3, "bfloat16", "this processor has bf16"),
        (ZEN_3, "bfloat16", "this processor has avx2"),
        (ICE_LAKE, "float32", "this processor has none of amx_bf16, avx512_bf16, bf16"),
        (SANDY_BRIDGE, "float32", "this processor has none of amx_bf16, avx512_bf16, bf16, avx2"),
        (GRAVITON_2, "float32", "this processor has none of amx_bf16, avx512_bf16, bf16, avx2"),
        (ONE_OF_TWO, "float32", "this processor has none of amx_bf16, avx512_bf16, bf16, avx2"),
        (
            "",
            "float32",
            "/proc/cpuinfo does not say what this processor has (none of amx_bf16, avx512_bf16, bf16, avx2)",
        ),
    ],
)
def test_a_cpu_decides_by_what_all_its_processors_multiply(cpu_info: str, dtype: str, because: str) -> None:
    assert choose_dtype("auto", "cpu", cpu_info, compiled=True) == (dtype, because)
    assert choose_dtype("auto", "auto", cpu_info, compiled=True) == (dtype, because)


def test_avx2_alone_is_not_enough_without_compiled_kernels() -> None:
    float32 = ("float32", "this processor has none of amx_bf16, avx512_bf16, bf16")
    assert choose_dtype("auto", "cpu", ZEN_3, compiled=False) == float32
    assert choose_dtype("auto", "cpu", ZEN_5, compiled=False)[0] == "bfloat16"


@pytest.mark.parametrize("device", ["cuda", "interpreter"])
def test_a_gpus_engine_stays_with_bfloat16(device: Device) -> None:
    assert choose_dtype("auto", device, SANDY_BRIDGE, compiled=False)[0] == "bfloat16"


@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
def test_what_is_asked_for_is_taken(asked: Dtype) -> None:
    for cpu_info in (ZEN_5, SANDY_BRIDGE):
        assert choose_dtype(asked, "cpu", cpu_info, compiled=True) == (asked, "it was asked for")


def test_this_machines_own_words_can_be_read() -> None:
    dtype, because = choose_dtype("auto", "cpu", read_cpu_info(), compiled=True)
    assert dtype in ("bfloat16", "float32")
    assert because


def worker(folder: Path, **settings: str | int) -> WorkerConfig:
    own = {"role": "prefill", "num_pages": 4, "load_format": "dummy"}
    return WorkerConfig.model_validate(needed(folder) | own | settings)


@pytest.mark.parametrize(("cpu_info", "expected"), [(ZEN_5, "bfloat16"), (SANDY_BRIDGE, "float32")])
def test_the_engine_is_built_so_and_the_log_says_why(
    cpu_info: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "cpuinfo").write_text(cpu_info)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    config = worker(tmp_path)
    caplog.set_level("INFO")
    engine = built(config)
    assert engine.layout.dtype == expected
    assert engine.executor.region.page_bytes == engine.layout.page_bytes
    assert f"dtype {expected}: this processor has" in caplog.text


def test_pages_of_a_gpu_have_digests_that_it_takes_itself() -> None:
    assert (page_digest("cuda"), page_digest("cpu")) == ("splitmix64", "xxh3")


def test_pages_of_other_weights_do_not_pass_for_these(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 64, "intermediate_size": 64}))
    hashes = set()
    for settings in (
        {"quantization": "auto"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int4", "quantized_inputs": 8},
    ):
        config = worker(tmp_path, dtype="bfloat16", **settings)
        hashes.add(built(config).layout.weights_hash)
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("quantization", "older", "newer"),
    [("int8", "int8 x 8 bits, floats of 8 bits x 16 bits", "int8 x 8 bits"), ("none", "none", "none")],
)
def test_weights_of_a_gpu_that_rounds_inputs_have_another_name(
    quantization: ChosenQuantization, older: str, newer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(form, "choose_quantization", lambda *_: quantization)
    for capability, expected in (((8, 0), older), ((9, 0), newer)):
        monkeypatch.setattr(form, "device_of", lambda _, has=capability: Chip(has, 100))
        asked = worker(tmp_path, device="cuda", dtype="bfloat16", quantized_inputs=8)
        assert form.choose_form(asked, open_model(asked)).weights_hash.endswith(f" 0 {expected}")


def test_a_gpus_worker_loads_its_embedding_as_the_file_has_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 64, "intermediate_size": 64}))
    found = {}
    for device, quantization in (("cuda", "int8"), ("cuda", "none"), ("cpu", "int8")):
        asked = worker(tmp_path, device=device, dtype="bfloat16", quantization=quantization)
        model = form.load_form(asked, form.choose_form(asked, open_model(asked)), torch.device("cpu"), None)
        assert isinstance(model, Decoder)
        assert model.embedding is not None
        found[device, quantization] = model.ops.embed(torch.arange(16), model.embedding)
    assert torch.equal(found["cuda", "int8"], found["cuda", "none"])
    assert not torch.equal(found["cuda", "int8"], found["cpu", "int8"])


def test_a_gpus_worker_loads_rows_of_each_layer_as_the_file_has_them(tmp_path: Path) -> None:
    write_model("gemma4-shared", tmp_path)
    found = {}
    for device, quantization in (("cuda", "int8"), ("cuda", "none"), ("cpu", "int8"), ("cpu", "int4")):
        asked = worker(tmp_path, device=device, dtype="bfloat16", quantization=quantization)
        chosen = form.choose_form(asked, open_model(asked))
        model = form.load_form(asked, chosen, torch.device("cpu"), None)
        assert isinstance(model, Decoder)
        assert model.layer_inputs is not None
        found[device, quantization] = model.ops.embed(torch.arange(16), model.layer_inputs.table)
    assert torch.equal(found["cuda", "int8"], found["cuda", "none"])
    assert not torch.equal(found["cuda", "int8"], found["cpu", "int8"])
    assert torch.equal(found["cpu", "int8"], found["cpu", "int4"]), "tables have at least 8 bits"


def test_rows_of_latents_are_not_those_of_workers_that_order_their_features_otherwise(tmp_path: Path) -> None:
    latent = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    named = {"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 8, **latent}
    for given, is_latent in ((TINY, False), ({**TINY, **named}, True)):
        (tmp_path / "config.json").write_text(json.dumps(given))
        config = worker(tmp_path)
        assert form.choose_form(config, open_model(config)).weights_hash.endswith(form.LATENT_ROWS) == is_latent


def test_inputs_of_quantized_products_have_8_or_16_bits_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Model] = []

    def load(*given: object) -> Model:
        loaded.append(load_model(*given))
        return loaded[-1]

    monkeypatch.setattr(form, "load_model", load)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 64, "intermediate_size": 64}))
    for bits in (8, 16):
        config = worker(tmp_path, dtype="bfloat16", quantization="int8", quantized_inputs=bits)
        built(config)
        matrices = [each for each in loaded[-1].matrices() if isinstance(each, Tiles)]
        assert {each.input_bits for each in matrices if each.bits != BFLOAT16_BITS} == {bits}
    for bad in (12, 0, -8, 32, "many"):
        with pytest.raises(ValidationError, match="quantized_inputs"):
            worker(tmp_path, quantized_inputs=bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "on_cpu", "on_gpu"),
    [
        ("int8", "8 of 8", "8 of 8"),
        ("words", "8 of 8", None),
        ("gptq", "8 of 8", None),
        *long(("gptq, 8 bits", "8 of 8", None)),  # it has minimums
        *long(("awq", "8 of 8", None)),
        ("fp8 of outputs", None, "8 of 8"),
        ("int4", "8 of 8", None),  # whose head has 8 bits
        (None, None, None),
    ],
)
def test_inputs_of_8_bits_that_no_product_takes_are_refused_and_others_are_counted(
    case: str | None, on_cpu: str | None, on_gpu: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model("llama3", tmp_path / "plain", num_hidden_layers=2)
    form_of = "int4" if case == "int4" else "auto"
    if case is not None and form_of == "auto":
        published(case, folder, tmp_path / "coded")
        folder = tmp_path / "coded"
    checkpoint, cpu = open_directory(folder), torch.device("cpu")
    asked = worker(folder, dtype="bfloat16", quantized_inputs=8)
    caplog.set_level("INFO")
    for expected, device, ops in ((on_cpu, "cpu", ops_for(cpu, 8)), (on_gpu, "cuda", CudaOps(8))):
        chosen = choose_quantization(form_of, checkpoint, "bfloat16", device)
        tensors = Tensors(weights_in_form(checkpoint, chosen), torch.bfloat16, cpu)
        model = Decoder.build(checkpoint.config, tensors, ops)
        caplog.clear()
        if expected is None:
            with pytest.raises(ConfigError, match=r"^quantized_inputs: 8: no product of these weights .* 16 is served"):
                form.check_inputs(asked, model)
        else:
            form.check_inputs(asked, model)
            assert f"inputs of {expected} matrices of layers are rounded to 8 bits" in caplog.text
    form.check_inputs(worker(folder, dtype="bfloat16"), model)


def test_a_worker_of_floats_does_not_start_with_inputs_of_8_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    config = worker(tmp_path, dtype="bfloat16", quantized_inputs=8)
    with pytest.raises(ConfigError, match=r"^quantized_inputs: 8: "):
        built(config)
