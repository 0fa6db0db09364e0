"""Whatever is wrong with a file of a model, the operator is told which file it is: a ConfigError, never a traceback."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_fakes import model_folder
from safetensors.torch import save_file

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.open import check_model, open_checkpoint

JSON_FILES = {
    "config.json": None,  # as the folder has it
    "tokenizer.json": None,
    "generation_config.json": {"temperature": 0.5, "eos_token_id": [1]},
    "tokenizer_config.json": {"eos_token": "a", "chat_template": "{{ messages }}", "added_tokens_decoder": {}},
    "model.safetensors.index.json": {"weight_map": {"a": "model-1.safetensors"}},
}
OTHER_FILES = ("chat_template.jinja", "model-1.safetensors")

Break = Callable[[Path], object]
Tensors = Mapping[str, npt.NDArray[np.float32]]
WriteGguf = Callable[..., Path]


def whole_model(parent: Path) -> Path:
    folder = model_folder(parent)
    for name, content in JSON_FILES.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    save_file({"a": torch.zeros(64)}, folder / "model-1.safetensors")
    return folder


def writing(content: bytes) -> Break:
    return lambda file: file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def linking_to(target: str) -> Break:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return link


ANY_FILE: dict[str, Break] = {
    "not UTF-8": writing(b"\xff\xfe{}"),
    "empty": writing(b""),
    "truncated": truncate,
    "a directory": replace_by_directory,
    "unreadable": linking_to("/proc/self/mem"),  # for root too
    "a link to nowhere": linking_to("nowhere"),
}
WRONG_JSON: dict[str, Break] = {
    "no JSON": writing(b"nonsense"),
    "a list": writing(b"[1]"),
    "a string": writing(b'"text"'),
    "a number": writing(b"7"),
    "null": writing(b"null"),
    "nested without end": writing(b'{"a":' * 100_000),
    "a number without end": writing(b'{"a": 1' + b"0" * 10_000 + b"}"),
}
WRONG_TEMPLATES: dict[str, Break] = {
    "syntax": writing(b"{% if %}"),
    "an unknown filter": writing(b"{{ messages | nonsense }}"),
    "blocks without end": writing(b"{% if x %}" * 5000 + b"{% endif %}" * 5000),
    "loops without end": writing(b"{% for x in y %}" * 50 + b"{% endfor %}" * 50),
}
CASES = [
    *((name, how, break_) for name in (*JSON_FILES, *OTHER_FILES) for how, break_ in ANY_FILE.items()),
    *((name, how, break_) for name in JSON_FILES for how, break_ in WRONG_JSON.items()),
    *(("chat_template.jinja", how, break_) for how, break_ in WRONG_TEMPLATES.items()),
]


def refusal(model: Path) -> str:
    """Return why a model is refused, or its path if it opens."""
    try:
        return str(check_model(model).path)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("name", "how", "break_"), CASES, ids=[f"{name}: {how}" for name, how, _ in CASES])
def test_a_broken_file_is_named(tmp_path: Path, name: str, how: str, break_: Break) -> None:
    folder = whole_model(tmp_path)
    check_model(folder)
    break_(folder / name)
    with pytest.raises(ConfigError) as refused:
        check_model(folder)
    assert str(folder) in str(refused.value), how
    assert name in str(refused.value), how


def test_a_template_of_the_tokenizers_config_is_named_too(tmp_path: Path) -> None:
    folder = whole_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    for template in ("{% if %}", 7, {}, [7], [{"name": [], "template": "x"}], [{"name": "default", "template": 7}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(ConfigError, match=r"model(/|: )tokenizer_config\.json: chat_template: "):
            check_model(folder)


@pytest.mark.parametrize(
    "weights", [["a"], {"a": 7}, {"a": "../x"}, {"a": "missing.safetensors"}, {"a": "config.json"}]
)
def test_an_index_that_names_no_files_of_weights_is_named(tmp_path: Path, weights: object) -> None:
    folder = whole_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match=r"model: model\.safetensors\.index\.json|missing\.safetensors|config\.json"):
        check_model(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = {
    "config.json": [
        *("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *(
            "num_key_value_heads",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "layer_types",
        ),
        *("rope_parameters", "eos_token_id", "bos_token_id", "tie_word_embeddings", "sliding_window", "hidden_act"),
        *("quantization_config", "dtype", "torch_dtype"),
    ],
    "generation_config.json": [
        *("max_new_tokens", "repetition_penalty", "do_sample", "top_k", "temperature", "eos_token_id"),
    ],
    "tokenizer_config.json": ["eos_token", "bos_token", "added_tokens_decoder", "chat_template"],
    "tokenizer.json": [
        *("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor"),
        *("decoder", "model"),
    ],
    "model.safetensors.index.json": ["weight_map"],
}


@pytest.mark.parametrize("name", KEYS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_file_holds_a_model_opens_or_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = whole_model(tmp_path_factory.mktemp("any"))
    content = json.loads((folder / name).read_text())
    key = data.draw(st.sampled_from(KEYS[name]))
    (folder / name).write_text(json.dumps({**content, key: data.draw(JSON)}))
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is not an integer from 1 to 4096"),
        ("config.json", {"num_hidden_layers": 10**400}, "num_hidden_layers: "),
        ("config.json", {"hidden_size": 10**400}, "hidden_size: "),
        ("config.json", {"hidden_size": 2**30}, "hidden_size: "),
        ("config.json", {"vocab_size": 10**30}, "vocab_size: "),
        ("generation_config.json", {"max_new_tokens": 10**400}, "max_new_tokens"),
        ("generation_config.json", {"repetition_penalty": -(10**400)}, "repetition_penalty"),
        ("generation_config.json", {"temperature": 10**400}, "temperature"),
        ("model.safetensors.index.json", {"weight_map": {"": ""}}, "'' is not the name of a file"),
        ("model.safetensors.index.json", {"weight_map": {"": "."}}, "'.' is not the name of a file"),
    ],
)
def test_numbers_beyond_all_bounds_and_names_of_no_file_are_refused(
    tmp_path: Path, name: str, change: dict[str, object], problem: str
) -> None:
    folder = whole_model(tmp_path)
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **change}))
    said = refusal(folder)
    assert str(folder) in said
    assert problem in said


@pytest.fixture
def gguf_model(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object], embedding: Tensors
) -> Path:
    model = {f"llama.{key}": value for key, value in tiny_model.items()}
    return write_gguf("llama", model | tokenizer_keys | {"tokenizer.chat_template": "{{ messages }}"}, embedding)


def test_a_broken_gguf_file_is_named(gguf_model: Path) -> None:
    whole = gguf_model.read_bytes()
    check_model(gguf_model)
    for share in range(8):
        gguf_model.write_bytes(whole[: len(whole) * share // 8])
        with pytest.raises(ConfigError, match=r"tiny\.gguf: "):
            check_model(gguf_model)
    for break_ in (ANY_FILE["not UTF-8"], ANY_FILE["empty"], *WRONG_JSON.values(), ANY_FILE["unreadable"]):
        break_(gguf_model)
        with pytest.raises(ConfigError, match=r"tiny\.gguf: "):
            check_model(gguf_model)
    gguf_model.unlink()
    for break_ in (gguf_model.mkdir, gguf_model.rmdir):
        break_()
        with pytest.raises(ConfigError, match=r"tiny\.gguf: "):
            check_model(gguf_model)


@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_a_gguf_file_holds_it_opens_or_is_refused_by_name(gguf_model: Path, data: st.DataObject) -> None:
    whole = bytearray(gguf_model.read_bytes())
    changed = gguf_model.with_name("changed.gguf")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, len(whole) - 1))
        whole[place] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 127, 128, 255]))
    changed.write_bytes(whole)
    assert str(changed) in refusal(changed)


def test_weights_are_looked_at_only_where_they_are_needed(tmp_path: Path) -> None:
    folder = whole_model(tmp_path)
    truncate(folder / "model-1.safetensors")
    assert check_model(folder, with_weights=False).path == open_checkpoint(folder).path
