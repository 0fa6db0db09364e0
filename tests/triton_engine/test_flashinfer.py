"""FlashInfer is called as it documents, and is used only where its results are the kernels'.

A double stands in for the library, which needs a GPU: it computes what the documentation says of each argument.
"""

import ast
import inspect
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import scaled
from long_cases import long
from small_shapes import FOUR_HEADS, MISTRAL, SMALL
from torch import Tensor
from worker_settings import needed

from pdserve.engine.attention_flashinfer import FlashInferPrompts, why_not
from pdserve.engine.attention_triton import attention_spec
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.kernels.attention import AttentionSpec
from pdserve.kernels.kv_rows import KvRows
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.settings.config import WorkerConfig

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 16, 60
SPEC = AttentionSpec(6, 2, 32, PAGE_SIZE, 1, 0.3)
LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=256, max_model_len=256, eos_token_ids=frozenset())
SMALL_MISTRAL = {**SMALL, **MISTRAL, **FOUR_HEADS, "vocab_size": 300}


class Wrapper:
    """The library's wrapper, in float64. `mistake` is made on purpose."""

    mistake = ""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(  # noqa: PLR0913, PLR0917 - the library's
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: object = "float16",
        kv_data_type: object = None,
    ) -> None:
        if self.mistake == "raises":
            raise RuntimeError("no nvcc")
        assert causal
        assert q_data_type == kv_data_type
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 for array in arrays)
        self.arrays, self.page_size, self.scale = [array.tolist() for array in arrays], page_size, sm_scale
        self.window = window_left + 1 if window_left >= 0 else 1 << 30
        self.heads = num_qo_heads, num_kv_heads, head_dim_qk

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        queries, pages, indices, last = self.arrays
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        assert q.is_contiguous()
        for number in range(len(last)):
            mine = indices[pages[number] : pages[number + 1]]
            length = (len(mine) - 1) * self.page_size + last[number]
            k, v = (
                part[mine].double().transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(
                    self.heads[0] // self.heads[1], 1
                )
                for part in paged_kv_cache
            )  # fmt: skip
            rows = slice(queries[number], queries[number + 1])
            count = rows.stop - rows.start
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * self.scale
            position = torch.arange(length - count, length)[:, None] - int(self.mistake == "off by one")
            key = torch.arange(length)
            visible = (key <= position) & (key > position - self.window)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return Wrapper


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *long(torch.float16)])
def test_results_that_are_the_kernels_are_taken(window: int | None, dtype: torch.dtype) -> None:
    spec = AttentionSpec(6, 2, 32, PAGE_SIZE, 1, 0.3, dtype, window)
    assert why_not([spec], CPU) == ""


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [("off by one", r"results differ from the kernels' by (\d|nan)"), ("raises", "RuntimeError: no nvcc")],
)
def test_a_library_that_errs_is_refused_with_the_reason(
    library: type[Wrapper], monkeypatch: pytest.MonkeyPatch, mistake: str, reason: str
) -> None:
    monkeypatch.setattr(library, "mistake", mistake)
    assert re.search(reason, why_not([SPEC], CPU))


@pytest.mark.usefixtures("library")
def test_float32_is_refused() -> None:
    assert "not torch.float32" in why_not([AttentionSpec(6, 2, 32, PAGE_SIZE, 1, 0.3, torch.float32)], CPU)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="it is installed")
def test_without_the_library_the_reason_says_what_to_install() -> None:
    assert "pip install flashinfer-python" in why_not([SPEC], CPU)


@pytest.mark.usefixtures("library")
def test_an_engine_whose_prompts_it_computes_draws_the_same_tokens() -> None:
    config = ModelConfig.from_hf(SMALL_MISTRAL)
    weights = scaled(dummy_weights(config))
    model = load_model(config, weights, torch.float32)
    prompts = [[(7 * i + length) % 300 for i in range(length)] for length in (1, 40)]
    rows = KvRows(config.head_dim, model.dtype)
    prompts_attention = FlashInferPrompts(
        attention_spec(config, config.design.layers[0].attention.scores, PAGE_SIZE, NUM_PAGES, rows), CPU
    )
    runner = CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS, prompts_attention)
    expected = greedy_texts(Runner(model, NUM_PAGES, PAGE_SIZE), prompts, 2, chunk_tokens=25)
    assert greedy_texts(runner, prompts, 2, chunk_tokens=25) == expected


def test_it_is_for_gpus_alone() -> None:
    given = needed(Path("m"))
    with pytest.raises(ValueError, match="attention_backend: flashinfer needs device cuda, not auto"):
        WorkerConfig.model_validate({**given, "attention_backend": "flashinfer"})
    assert WorkerConfig.model_validate({**given, "attention_backend": "flashinfer", "device": "cuda"})


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed: it takes 857 MB")
def test_the_installed_library_takes_what_the_double_takes() -> None:
    found = find_spec("flashinfer")
    assert found is not None
    assert found.origin is not None
    source = ast.parse(Path(found.origin).with_name("prefill.py").read_text(encoding="utf-8"))
    name = "BatchPrefillWithPagedKVCacheWrapper"
    (wrapper,) = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name]
    for method in ("__init__", "plan", "run"):
        *_, theirs = [node for node in wrapper.body if isinstance(node, ast.FunctionDef) and node.name == method]
        names = [argument.arg for argument in (*theirs.args.args, *theirs.args.kwonlyargs)]
        ours: Any = getattr(Wrapper, method)
        assert set(inspect.signature(ours).parameters) <= set(names)
        num_positional = 9 if method == "plan" else 3
        assert names[:num_positional] == list(inspect.signature(ours).parameters)[:num_positional]
