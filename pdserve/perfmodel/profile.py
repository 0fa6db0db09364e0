"""Profile files: measured step costs of a model on a device. Errors name file, line and field."""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdserve.errors import ConfigError
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrefillFields(_Section):
    """Seconds of a prefill step."""

    step_s: Seconds
    token_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    token_context_s: Seconds = Field(description="For each unit of attention work: a prompt of n tokens has n * n.")

    def curve(self) -> Curve:
        return Curve(self.step_s, self.token_s, self.token_context_s)


class DecodeFields(_Section):
    """Seconds of a decode step, for batches up to a size."""

    max_sequences: int | None = Field(None, ge=1)
    step_s: Seconds
    sequence_s: Seconds
    kv_token_s: Seconds

    def piece(self) -> DecodePiece:
        return DecodePiece(self.max_sequences, Curve(self.step_s, self.sequence_s, self.kv_token_s))


class Configuration(_Section):
    """A worker on `tp` devices."""

    tp: int = Field(ge=1)
    kv_tokens: int = Field(ge=1, description="Tokens whose KV fits beside the weights.")
    prefill: PrefillFields
    decode: list[DecodeFields] = Field(min_length=1)

    def costs(self) -> StepCosts:
        pieces = tuple(fields.piece() for fields in self.decode)
        return StepCosts(self.prefill.curve(), pieces)


class LinkFields(_Section):
    """The way between two workers."""

    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    latency_s: Seconds = 0.001


class Profile(_Section):
    """What is known of a model on a kind of device."""

    model: str
    device: str = ""
    source: str = ""
    kv_bytes_per_token: int = Field(ge=1)
    link: LinkFields
    configurations: list[Configuration] = Field(min_length=1)

    def configuration(self, tp: int) -> Configuration:
        """Return the configuration of a tensor-parallel degree; ConfigError where it was not measured."""
        for configuration in self.configurations:
            if configuration.tp == tp:
                return configuration
        known = sorted(configuration.tp for configuration in self.configurations)
        raise ConfigError(f"tp: {tp} is not in the profile of {self.model}; {known} are")


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as YAML that `read_profile` takes."""
    path.write_text(yaml.safe_dump(profile.model_dump(), sort_keys=False), encoding="utf-8")


def shipped_profile() -> Path:
    """Return the profile that comes with pdserve."""
    return Path(__file__).with_name("profiles") / "opt-13b-a100.yaml"


def read_profile(path: Path) -> Profile:
    """Read a profile, YAML or JSON; ConfigError names the file, the line and the field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return Profile.model_validate(yaml.safe_load(text))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}, line {_line(node, first['loc'])}: {field}: {first['msg']}") from error


def _line(node: yaml.Node | None, place: tuple[int | str, ...]) -> int:
    """Return the line of a value, or of the nearest thing around it that is there."""
    line = 1
    for step in ("", *place):
        if isinstance(node, yaml.MappingNode) and step != "":
            node = next((value for key, value in node.value if key.value == step), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step] if step < len(node.value) else None
        if node is None:
            break
        line = node.start_mark.line + 1
    return line
