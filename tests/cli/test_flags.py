"""Each setting of a process is a flag of the same name; vLLM's spellings reach the same settings."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from pdserve.base.errors import ConfigError
from pdserve.cli.flags import config_flags
from pdserve.cli.options import API_KEY, RouterFlags, key_for
from pdserve.cli.processes import CONFIGS
from pdserve.settings.config import WorkerConfig
from pdserve.settings.process import ProcessConfig

RUNNER = CliRunner()


class Sample(ProcessConfig):
    """One field of each kind."""

    count: int = Field(3, ge=0, description="How many.")
    share: float = Field(0.5, description="How much.")
    colour: Literal["red", "blue"] = Field("red", description="Which.")
    width: Literal[8, 16] = Field(16, description="How wide.")
    file: Path | None = Field(None, description="Where.")
    hosts: tuple[str, ...] = Field((), description="Whom.")
    loud: bool = Field(False, description="Whether.")


def parsed(cls: type[ProcessConfig], *arguments: str) -> dict[str, object]:
    """Return the flags that a command made from `cls` is given, those not set left out."""
    app = typer.Typer()
    seen: dict[str, object] = {}

    @config_flags(cls)
    def command(config: Annotated[Path | None, typer.Option("--config")] = None, **flags: object) -> None:
        seen.update(flags, config=config)

    app.command()(command)
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {name: value for name, value in seen.items() if value is not None}


def test_a_flag_that_is_not_given_says_nothing() -> None:
    assert parsed(Sample) == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--count", "7"), {"count": 7}),
        (("--share", "0.25"), {"share": 0.25}),
        (("--colour", "blue"), {"colour": "blue"}),
        (("--width", "8"), {"width": 8}),
        (("--file", "/x"), {"file": Path("/x")}),
        (("--hosts", "a:1", "--hosts", "b:2"), {"hosts": ["a:1", "b:2"]}),
        (("--loud",), {"loud": True}),
        (("--no-loud",), {"loud": False}),
        (("--config", "/y", "--log-level", "debug"), {"config": Path("/y"), "log_level": "debug"}),
    ],
)
def test_flags_carry_their_types(arguments: tuple[str, ...], expected: dict[str, object]) -> None:
    assert parsed(Sample, *arguments) == expected


@pytest.mark.parametrize(
    ("spelling", "field"),
    [
        ("--block-size", "page_size"),
        ("--page-size", "page_size"),
        ("--num-gpu-blocks-override", "num_pages"),
        ("--max-model-len", "max_model_len"),
        ("--max-num-seqs", "max_num_seqs"),
        ("--max-num-batched-tokens", "max_num_batched_tokens"),
        ("--seed", "seed"),
    ],
)
def test_vllm_spellings_reach_the_same_settings(spelling: str, field: str) -> None:
    assert parsed(WorkerConfig, spelling, "8") == {field: 8}


def test_a_default_that_differs_between_the_roles_of_workers_is_shown_for_each(
    pdserve: Callable[..., CompletedProcess[str]],
) -> None:
    shown = " ".join(pdserve("up", "--help").stdout.split())
    assert "by default 2048 while its role is prefill, where hardly anything decodes beside it, or 512." in shown
    assert shown.count("Sequences in one step.") == 1


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_every_default_is_shown_in_the_help(cls: type[ProcessConfig]) -> None:
    app = typer.Typer()

    @config_flags(cls)
    def command(**flags: object) -> None:
        raise AssertionError(flags)

    app.command()(command)
    shown = " ".join(RUNNER.invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    for name, field in cls.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        if not field.is_required() and field.default_factory is None and field.default not in (None, "", ()):
            assert f"(default: {field.default})" in shown


@pytest.mark.parametrize(
    "url", ["https://host:1", "HTTPS://host", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost"]
)
def test_a_key_goes_over_tls_or_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    assert key_for(url) == "secret"


@pytest.mark.parametrize("url", ["http://host:1", "http://10.0.0.1", "host:1", "http://[::2", "//host"])
def test_a_key_does_not_leave_this_machine_in_clear(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    with pytest.raises(ConfigError):
        RouterFlags(ca_file=Path("ca.crt")).http(url)
