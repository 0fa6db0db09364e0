"""Models in Hugging Face directories, written by transformers itself."""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import GenerationDefaults, tokenizer_archive
from pdserve.checkpoint.open import open_checkpoint
from pdserve.text.chat import ChatMessage, ChatOptions

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "tiny-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(path, max_shard_size="30KB")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>", "<turn>"]
    backend.train_from_iterator(
        ["hello there, hello world"],
        trainers.BpeTrainer(vocab_size=290, show_progress=False, initial_alphabet=alphabet, special_tokens=special),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, eos_token_id=[1, 2]).save_pretrained(path)
    return path


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved model that a test may change."""
    copy = tmp_path / saved.name
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def change_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_everything_a_directory_says_is_read(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.config.num_layers == 2
    assert checkpoint.eos_token_ids == (1, 2)
    assert checkpoint.generation == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9)
    assert checkpoint.special_tokens["eos_token"] == "<eos>"
    chat = checkpoint.chat()
    assert chat is not None
    assert chat.render([ChatMessage("user", "hi")]) == "<bos>user: hi<eos>"


def test_weights_equal_transformers_over_several_files(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert len(checkpoint.weight_files) > 1
    expected = LlamaForCausalLM.from_pretrained(saved).state_dict()
    for name, stored in checkpoint.weights().items():
        np.testing.assert_array_equal(stored.read(()), expected.pop(name).numpy(), err_msg=name)
    assert not expected


@pytest.mark.parametrize("first", ["", "<bos> "])
def test_ids_equal_transformers(directory: Path, first: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=f"{first}$A", special_tokens=[("<bos>", 0)])
    backend.save(str(directory / "tokenizer.json"))
    change_json(directory / "tokenizer_config.json", add_eos_token=True)  # overruled by tokenizer.json
    ours = open_checkpoint(directory).tokenizer()
    reference = AutoTokenizer.from_pretrained(directory)
    for text in ("hello world", "", "a<turn>b", " <eos>\n\n 12 é😀"):
        for add_special in (True, False):
            expected = reference(text, add_special_tokens=add_special).input_ids
            assert ours.encode(text, add_special=add_special) == expected, text


def test_the_template_file_goes_before_the_one_in_the_tokenizer_config(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    change_json(directory / "tokenizer_config.json", chat_template="in the config")
    assert open_checkpoint(directory).chat_template == "in the config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    change_json(directory / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(directory).chat_template == "the default"
    (directory / "chat_template.jinja").write_text("in its file")
    assert open_checkpoint(directory).chat_template == "in its file"


NAMED = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0] }}: {{ messages[0].content }}", "rag": "r"}


@pytest.mark.parametrize("are_files", [True, False])
def test_the_template_for_tools_is_taken_where_tools_are_given_as_in_transformers(
    directory: Path, *, are_files: bool
) -> None:
    """Both as transformers saves several templates, and as older models have them."""
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    reference = AutoTokenizer.from_pretrained(directory)
    reference.chat_template = NAMED
    reference.save_pretrained(directory, save_jinja_files=are_files)
    assert (directory / "additional_chat_templates" / "tool_use.jinja").exists() == are_files
    reference = AutoTokenizer.from_pretrained(directory)
    checkpoint = open_checkpoint(directory)
    asked = [{"role": "user", "content": "hello"}]
    for tools in (None, [{"x": 1}]):
        chat = checkpoint.chat(with_tools=tools is not None)
        assert chat is not None
        rendered = chat.render([ChatMessage("user", "hello")], ChatOptions(tools=tools))
        assert rendered == reference.apply_chat_template(asked, tools=tools, tokenize=False)
    unpacked = directory.parent / "unpacked"
    zipfile.ZipFile(io.BytesIO(tokenizer_archive(checkpoint))).extractall(unpacked)
    again = AutoTokenizer.from_pretrained(unpacked)
    assert again.chat_template == {name: NAMED[name] for name in ("default", "tool_use")}


def test_a_model_without_template_or_generation_config_opens(directory: Path) -> None:
    for name in ("chat_template.jinja", "generation_config.json"):
        (directory / name).unlink(missing_ok=True)
    change_json(directory / "tokenizer_config.json", chat_template=None)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.chat() is None
    assert checkpoint.eos_token_ids == (1,)
    assert checkpoint.generation == GenerationDefaults()


def test_the_tokenizers_own_end_ends_an_answer_too(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    added = {"2": {"content": "<turn>", "special": True}}
    change_json(directory / "tokenizer_config.json", eos_token="<turn>", added_tokens_decoder=added)
    assert open_checkpoint(directory).eos_token_ids == (1, 2)


def test_greedy_is_the_default_where_the_publisher_says_do_not_sample(directory: Path) -> None:
    change_json(directory / "generation_config.json", do_sample=False)
    assert open_checkpoint(directory).generation == GenerationDefaults(temperature=0.0)


def test_the_limit_of_new_tokens_is_read_whether_or_not_the_publisher_samples(directory: Path) -> None:
    for do_sample in (True, False):
        change_json(directory / "generation_config.json", do_sample=do_sample, max_new_tokens=77)
        assert open_checkpoint(directory).generation.max_tokens == 77


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_of_nothing_means_that_all_tokens_may_be_drawn(directory: Path, off: int) -> None:
    change_json(directory / "generation_config.json", top_k=off)
    assert open_checkpoint(directory).generation.top_k == 0


def test_defaults_no_request_could_have_are_refused_by_name() -> None:
    assert GenerationDefaults(top_k=50).within(vocab_size=40) == GenerationDefaults(top_k=40)
    for defaults, complaint in (
        (GenerationDefaults(top_p=0.0), "top_p: 0.0 is outside"),
        (GenerationDefaults(temperature=-1.0), "temperature: -1.0 is outside"),
        (GenerationDefaults(max_tokens=0), "max_new_tokens: 0 is outside"),
    ):
        with pytest.raises(ConfigError, match=rf"generation_config\.json: {complaint}"):
            defaults.within(vocab_size=40)


def test_the_fingerprint_follows_config_and_weights_and_nothing_else(directory: Path) -> None:
    before = open_checkpoint(directory).fingerprint
    change_json(directory / "tokenizer_config.json", chat_template="another")
    assert open_checkpoint(directory).fingerprint == before
    change_json(directory / "config.json", rope_theta=12345.0)
    other_config = open_checkpoint(directory).fingerprint
    assert other_config != before
    last = open_checkpoint(directory).weight_files[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\x55")
    assert open_checkpoint(directory).fingerprint not in (before, other_config)


def test_pickled_weights_are_refused(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"tiny-llama: .*pytorch_model\.bin; pickles run code"):
        open_checkpoint(directory)


def test_a_directory_of_a_config_opens_but_has_no_weights(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"tiny-llama: holds neither"):
        open_checkpoint(directory).weights()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_broken_json_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(ConfigError, match=rf"tiny-llama: {name}: "):
        open_checkpoint(directory)
    (directory / name).write_text("[]")
    with pytest.raises(ConfigError, match=rf"{name}: is not a JSON object"):
        open_checkpoint(directory)


def test_a_missing_or_broken_tokenizer_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_checkpoint(directory).tokenizer()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tiny-llama: holds neither tokenizer\.json nor tokenizer\.model"):
        open_checkpoint(directory).tokenizer()


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: there is no such"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither a config\.json nor a \.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"model\.bin: is neither a directory nor a \.gguf"):
        open_checkpoint(tmp_path / "model.bin")


def test_opening_needs_neither_torch_nor_numpy(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pdserve.checkpoint.open import open_checkpoint\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1])); checkpoint.tokenizer(); checkpoint.chat()\n"
        "checkpoint.fingerprint\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(directory)], check=False).returncode == 0
