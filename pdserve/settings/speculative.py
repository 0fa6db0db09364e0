"""Settings of speculative decoding, with vLLM's keys."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdserve.base.yaml_models import FieldError, parsed_json

MAX_TOKENS = 15  # rows of a sequence beside its own: so many as the kernels' tiles would take together


class SpeculativeConfig(BaseModel):
    """How a worker guesses tokens that one step then verifies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram", "draft_model", "eagle3", "mtp"] = Field(
        "ngram",
        description="ngram: what followed the latest tokens where they stood in the same sequence before. draft_model: "
        "what a smaller model samples. eagle3: what an EAGLE-3 head samples, from what the model computes. mtp: what "
        "the model's own module samples.",
    )
    num_speculative_tokens: int = Field(
        10, ge=1, le=MAX_TOKENS, description="Most guesses that a step verifies for a sequence."
    )
    prompt_lookup_min: int = Field(
        2, ge=1, le=32, description="How many of the latest tokens have to have stood together before."
    )
    prompt_lookup_max: int = Field(
        8, ge=1, le=32, description="How many of them are compared; of longer matches the latest counts."
    )
    model: str | None = Field(
        None, min_length=1, description="The draft model or head, a path or a name as of `model`; for these methods."
    )

    @model_validator(mode="after")
    def _has_keys_of_its_method(self) -> Self:
        has_model = self.method in ("draft_model", "eagle3")
        if self.model is not None and not has_model:
            raise FieldError(("model",), f"goes with method draft_model or eagle3, not with {self.method}")
        if self.model is None and has_model:
            raise FieldError(("model",), f"method {self.method} needs it")
        if self.method != "ngram":
            for key in sorted(self.model_fields_set & {"prompt_lookup_min", "prompt_lookup_max"}):
                raise FieldError((key,), f"goes with method ngram, not with {self.method}")
        return self

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            problem = f"{self.prompt_lookup_min} is over prompt_lookup_max {self.prompt_lookup_max}"
            raise FieldError(("prompt_lookup_min",), problem)
        return self


SpeculativeSetting = Annotated[SpeculativeConfig | None, BeforeValidator(parsed_json)]
