"""Profile files: measured step costs of a model on a device. Errors name file, line and field."""

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field

from pdserve.base.errors import ConfigError
from pdserve.base.yaml_models import read_model
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
    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    latency_s: Seconds = 0.001


class WindowFields(_Section):
    """Layers that see a part of the tokens, and keep their KV in pages of their own."""

    tokens: int = Field(ge=1, description="That a query of these layers sees, its own included.")
    ratio: int = Field(ge=1, description="Such layers for each layer that sees all tokens.")


class Profile(_Section):
    """What is known of a model on a kind of device."""

    model: str
    device: str = ""
    source: str = ""
    kv_bytes_per_token: int = Field(ge=1)
    window: WindowFields | None = Field(None, description="KV is counted as if there were none.")
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
    return read_model(Profile, path)
