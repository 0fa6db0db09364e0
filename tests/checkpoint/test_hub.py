"""Models by their names on the Hugging Face hub."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, REPOSITORY, FakeHub, fake_hub
from huggingface_hub import constants

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.hub import HubModel, parse_hub_name, repository_of
from pdserve.cli.models import list_models, model_name

SAFE = {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
SAFE |= {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
UNSAFE = {"pytorch_model.bin", "modeling_tiny.py", "training_args.pt", "onnx/model.onnx", "README.md"}
SNAPSHOT = Path(f"models--acme--tiny/snapshots/{COMMIT}")


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub({name: json.dumps({"name": name}).encode() for name in SAFE | UNSAFE}) as hub:
        yield hub


def visit(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the library look for the hub there, as HF_ENDPOINT does when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub) -> None:
    visit(monkeypatch, hub.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def test_only_files_that_run_no_code_are_fetched_and_kept_for_later(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve_model(f"{REPOSITORY}@v1") == tmp_path / SNAPSHOT
    assert set(hub.fetched) == SAFE
    folder = tmp_path / SNAPSHOT
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()} == SAFE
    visit(monkeypatch, "http://127.0.0.1:9")
    assert resolve_model(f"{REPOSITORY}@v1") == tmp_path / SNAPSHOT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(f"{REPOSITORY}@{COMMIT}") == tmp_path / SNAPSHOT
    list_models()
    assert f"{REPOSITORY}@{COMMIT}" in capsys.readouterr().out


def test_a_model_of_pickles_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub({"config.json": b"{}", "pytorch_model.bin": b"pickle"}) as pickled:
        visit(monkeypatch, pickled.address)
        with pytest.raises(ConfigError, match="pickled weights are never loaded"):
            resolve_model(REPOSITORY)
        assert pickled.fetched == ["config.json"]


@pytest.mark.parametrize(
    ("name", "offline", "says"),
    [
        ("acme/other", False, "acme/other is no path that exists, and the hub has none"),
        (f"{REPOSITORY}@v9", False, f"{REPOSITORY} has no revision v9"),
        (REPOSITORY, True, f"`pdserve models fetch {REPOSITORY}`"),
        ("acme..x/y--z", False, "acme..x/y--z"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, name: str, offline: bool, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve_model(name)


def test_names_of_the_hub_may_pin_a_revision() -> None:
    assert parse_hub_name("acme/tiny") == HubModel("acme/tiny")
    assert parse_hub_name("acme/tiny@v1.0") == HubModel("acme/tiny", "v1.0")
    assert [parse_hub_name(name) for name in ("tiny", "a/b/c", "acme/tiny@", "../x/y", "acme/ti ny")] == [None] * 5


@pytest.mark.parametrize("path", ["models/x.gguf", "models/x.Q4_0.GGUF", "../x", "./x", "models/.x"])
def test_a_path_that_does_not_exist_is_no_name_of_the_hub(path: str) -> None:
    assert parse_hub_name(path) is None
    with pytest.raises(ConfigError, match="neither a path that exists"):
        resolve_model(path)


def test_a_model_in_the_cache_is_called_by_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / SNAPSHOT
    folder.mkdir(parents=True)
    assert repository_of(folder) == REPOSITORY == model_name(str(folder)) == model_name(f"{REPOSITORY}@v1")
    assert repository_of(tmp_path) is None


@pytest.mark.parametrize("revision", ["..", "../x", ".hidden"])
def test_a_revision_is_no_path(revision: str) -> None:
    assert parse_hub_name(f"acme/tiny@{revision}") is None
