"""Workers of one machine map the same weights, and only bytes that are their own."""

import logging
import os
import resource
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import scaled
from mapped_files import mapped_kb
from small_shapes import FOUR_HEADS, SMALL

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.engine.runner import Runner
from pdserve.executor import memory
from pdserve.executor.memory import NUM_KEPT, share_weights
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model

PROMPTS = [[5, 9, 200, 41], [77, 3]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": True}
CONFIG = ModelConfig.from_hf({**SMALL, **FOUR_HEADS, **SIZES, "architectures": ["LlamaForCausalLM"], "vocab_size": 300})


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WORTH_BYTES", 1)


def model_in(quantization: ChosenQuantization = "none", dtype: torch.dtype = torch.bfloat16) -> Model:
    weights = scaled(dummy_weights(CONFIG))
    return load_model(CONFIG, in_form(weights, quantization), dtype)


def answers(model: Model) -> object:
    return greedy_texts(Runner(model, 60, 16), PROMPTS, 6)


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.weights")
    return path


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", torch.bfloat16), ("none", torch.float32), ("int8", torch.bfloat16), ("int4", torch.bfloat16)],
)
def test_a_second_worker_maps_what_the_first_has_written(
    tmp_path: Path, quantization: ChosenQuantization, dtype: torch.dtype
) -> None:
    first, second = model_in(quantization, dtype), model_in(quantization, dtype)
    expected = answers(first)
    share_weights(first, tmp_path / "weights", "a")
    path = only_file(tmp_path / "weights")
    written = path.stat()
    share_weights(second, tmp_path / "weights", "a")
    assert only_file(tmp_path / "weights").stat().st_ino == written.st_ino
    assert written.st_mode & 0o777 == 0o600
    assert answers(first) == answers(second) == expected
    assert mapped_kb(path, "Size") * 1024 >= 2 * written.st_size
    assert mapped_kb(path, "Private_Dirty") == 0


def test_the_engine_reads_what_is_mapped(tmp_path: Path) -> None:
    model = model_in("int8")
    expected = answers(model)
    share_weights(model, tmp_path, "a")
    for layer in model.layers:
        layer.mlp.down.data.zero_()  # type: ignore[attr-defined]
    assert answers(model) != expected


@pytest.mark.parametrize("break_it", [lambda raw: raw[:5000] + b"x" + raw[5001:], lambda raw: raw[:-1], lambda _: b""])
def test_a_file_with_other_bytes_is_written_anew(tmp_path: Path, break_it: object) -> None:
    first, second = model_in(), model_in()
    expected = answers(first)
    share_weights(first, tmp_path, "a")
    path = only_file(tmp_path)
    right = path.read_bytes()
    broken = path.with_suffix(".broken")
    broken.write_bytes(break_it(right))  # type: ignore[operator]
    broken.replace(path)  # as the first worker maps the file that was there
    share_weights(second, tmp_path, "a")
    assert path.read_bytes() == right
    assert answers(second) == expected


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_in()
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        share_weights(model, tmp_path, "a")
    assert "others than this user may write to it" in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_folder_keeps_few_files(tmp_path: Path) -> None:
    for number in range(NUM_KEPT + 2):
        share_weights(model_in(), tmp_path, str(number))
    assert len(list(tmp_path.glob("*.weights"))) == NUM_KEPT
    assert {each.suffix for each in tmp_path.iterdir()} == {".weights", ""}


def test_what_other_machines_have_in_the_folder_stays(tmp_path: Path) -> None:
    others = [tmp_path / f"elsewhere@{number}.{suffix}" for number in range(NUM_KEPT) for suffix in ("weights", "tmp")]
    for other in others:
        other.touch()
        os.utime(other, (0, 0))
    for number in range(2):
        share_weights(model_in(), tmp_path, str(number))
    assert all(other.exists() for other in others)
    assert len(list(tmp_path.glob("*.weights"))) == NUM_KEPT + 2


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"{os.uname().nodename}@of-a-killed-worker.tmp").write_bytes(b"half of it")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))  # fails in the middle, as a full disk does
    try:
        share_weights(model_in(), tmp_path, "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    path = tmp_path / f"{os.uname().nodename}@"
    assert f"weights are not shared with other workers: {path}" in caplog.text
    assert ".tmp: File too large; set shared_weights_dir to a folder that this user can write to" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]
