"""Settings come from one YAML file with flags over it; what is wrong is named, with where it stands."""

from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.cli.processes import CONFIGS
from pdserve.settings.config import WorkerConfig, load_config

COMPLETE = "model: m\nrole: decode\nworker_id: w\nrouters: [127.0.0.1:50052]\nsecret_file: /run/secret\n"


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.yaml"
    path.write_text(COMPLETE)
    return path


def test_a_complete_file_is_enough(yaml_file: Path) -> None:
    config = load_config(WorkerConfig, yaml_file)
    assert (config.model, config.worker_id, config.routers) == ("m", "w", ("127.0.0.1:50052",))
    assert config.secret_file == Path("/run/secret")


def test_flags_override_the_file_and_absent_flags_do_not(yaml_file: Path) -> None:
    yaml_file.write_text(COMPLETE + "page_size: 32\nmax_num_seqs: 5\n")
    config = load_config(WorkerConfig, yaml_file, {"page_size": 64, "max_num_seqs": None, "dtype": None})
    assert (config.page_size, config.max_num_seqs) == (64, 5)


@pytest.mark.parametrize(("device", "page_size"), [("auto", 16), ("cpu", 16), ("interpreter", 16), ("cuda", 64)])
def test_pages_are_of_the_size_that_the_device_wants_unless_told(tmp_path: Path, device: str, page_size: int) -> None:
    yaml_file = tmp_path / "worker.yaml"
    yaml_file.write_text(COMPLETE)
    assert load_config(WorkerConfig, yaml_file, {"device": device}).page_size == page_size
    assert load_config(WorkerConfig, yaml_file, {"device": device, "page_size": 32}).page_size == 32


def test_a_configuration_never_changes(yaml_file: Path) -> None:
    config = load_config(WorkerConfig, yaml_file)
    with pytest.raises(ValueError, match="frozen"):
        config.page_size = 8


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("page_sise: 3", ("page_sise", "unknown key", "did you mean page_size")),
        ("handoff_port: 70000", ("handoff_port", "70000", "65535")),
        ("page_size: 0", ("page_size", "0", "greater than or equal to 1")),
        ("dtype: int8", ("dtype", "int8", "bfloat16")),
        ("routers: []", ("routers",)),
        ("incarnation: 0", ("incarnation", "0")),
        ("lease_s: 4000000", ("lease_s", "3600")),
        ("worker_id: décode", ("worker_id", "pattern")),
        ("lease_s: 1", ("lease_s", "1", "greater than or equal to 1.5")),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_its_file(yaml_file: Path, line: str, parts: tuple[str, ...]) -> None:
    key = line.split(":", maxsplit=1)[0]
    kept = "".join(given for given in COMPLETE.splitlines(keepends=True) if not given.startswith(f"{key}:"))
    yaml_file.write_text(f"{kept}{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(WorkerConfig, yaml_file)
    for part in (str(yaml_file), *parts):
        assert part in str(caught.value)


def test_a_password_for_the_collector_is_refused_and_not_shown(yaml_file: Path) -> None:
    url = "https://user:hunter2@collector:4317"
    yaml_file.write_text(f"{COMPLETE}otlp_traces_endpoint: {url}\n")
    for file, flags in ((yaml_file, None), (None, {"otlp_traces_endpoint": url})):
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
            load_config(WorkerConfig, file, flags)
        assert "hunter2" not in str(caught.value)


def test_a_wrong_flag_is_named_as_a_flag(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: 0 is refused"):
        load_config(WorkerConfig, yaml_file, {"max_num_seqs": 0})


@pytest.mark.parametrize(("role", "num_tokens"), [("prefill", 2048), ("decode", 512), ("mixed", 512)])
def test_a_worker_of_each_role_has_its_own_default_of_tokens_in_a_step(role: str, num_tokens: int) -> None:
    given = {"model": "m", "worker_id": "w", "routers": ("host:1",), "secret_file": Path("secret"), "role": role}
    assert load_config(WorkerConfig, None, given).step_tokens[Role(role)] == num_tokens
    bounded = load_config(WorkerConfig, None, {**given, "max_num_batched_tokens": 7})
    assert set(bounded.step_tokens.values()) == {7}, "whatever role it is given"


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"(^|; )--worker-id: is required"):
        load_config(WorkerConfig, None, {"role": "decode", "model": "m"})


def test_an_unknown_key_is_named_before_the_one_that_it_makes_missing(yaml_file: Path) -> None:
    yaml_file.write_text(COMPLETE.replace("model:", "models:"))
    with pytest.raises(ConfigError, match="models: unknown key, did you mean model"):
        load_config(WorkerConfig, yaml_file)


@pytest.mark.parametrize("text", ["[1", "- a\n- b\n", "3", "1: 2"])
def test_a_file_that_does_not_hold_settings_is_refused(yaml_file: Path, text: str) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ConfigError, match=str(yaml_file)):
        load_config(WorkerConfig, yaml_file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: No such file"):
        load_config(WorkerConfig, tmp_path / "none.yaml")


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_every_setting_is_described_and_unknown_ones_are_refused_by_the_schema(cls: type[WorkerConfig]) -> None:
    schema = cls.model_json_schema()
    assert schema["additionalProperties"] is False
    assert [name for name, field in schema["properties"].items() if not field.get("description")] == []
