"""Settings of speculative decoding, with vLLM's keys."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdserve.base.yaml_models import FieldError, parsed_json
from pdserve.protocol.drafts import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from pdserve.settings.config import WorkerConfig

_PREFIXES = {"prompt_lookup": "ngram", "suffix_decoding": "suffix"}  # of keys, and whose they are


class SpeculativeConfig(BaseModel):
    """How a worker guesses tokens that one step then verifies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"] = Field(
        "ngram",
        description="ngram: what followed the latest tokens where they stood in the same sequence before. suffix: "
        "what followed them there or in recent answers to the same tenant. draft_model: "
        "what a smaller model samples. eagle3: what an EAGLE-3 head samples, from what the model computes. mtp: what "
        "the model's own module samples.",
    )
    num_speculative_tokens: int = Field(
        10, ge=1, le=MAX_DRAFT_TOKENS, description="Most guesses that a step verifies for a sequence."
    )
    prompt_lookup_min: int = Field(
        2, ge=1, le=32, description="How many of the latest tokens have to have stood together before."
    )
    prompt_lookup_max: int = Field(
        8, ge=1, le=32, description="How many of them are compared; of longer matches the latest counts."
    )
    suffix_decoding_max_tree_depth: int = Field(
        24, ge=2, le=64, description="How many of the latest tokens are compared, for method suffix."
    )
    suffix_decoding_max_cached_requests: int = Field(
        10_000, ge=0, description="Most recent answers kept; 0: none. Their tokens have a limit as well."
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, gt=0, le=MAX_DRAFT_TOKENS, description="Most guesses for each token that matched in a recent answer."
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0, le=1, description="Least share of recent answers that went on like a guess and those before it."
    )
    model: str | None = Field(
        None, min_length=1, description="The draft model or head, a path or a name as of `model`; for these methods."
    )

    @property
    def looks_up(self) -> bool:
        """Whether guesses are looked up in tokens; else a model makes them."""
        return self.method in _PREFIXES.values()

    def problem(self, worker: "WorkerConfig") -> str | None:
        """Return why workers like this do not guess so, or None."""
        degrees, has_head = worker.degrees, self.method in ("eagle3", "mtp")
        named = f"speculative_config.method: {self.method}"
        if degrees.pipeline > 1:
            return "speculative_config: pipeline stages verify no guesses yet"
        if worker.rank_memory == "own" and has_head and degrees.tensor > 1 and worker.device in ("auto", "cpu"):
            return f"{named} is not served with rank_memory own by several ranks on CPUs yet"
        if degrees.nodes > 1 and has_head:
            return f"{named} is not served with ranks on several machines yet"
        if worker.kv_cache_dtype != "auto" and not self.looks_up:
            return f"{named} is not served with kv_cache_dtype {worker.kv_cache_dtype}"
        if worker.kv_cache_dtype != "auto" and degrees.num_ranks > 1 and worker.device in ("cuda", "interpreter"):
            return f"{named} is not served with kv_cache_dtype {worker.kv_cache_dtype} by ranks with devices yet"
        if worker.attention_backend == "flashinfer" and has_head:
            return f"attention_backend: flashinfer is not served with speculative_config.method {self.method} yet"
        return None

    @model_validator(mode="after")
    def _has_keys_of_its_method(self) -> Self:
        has_model = self.method in ("draft_model", "eagle3")
        if self.model is not None and not has_model:
            raise FieldError(("model",), f"goes with method draft_model or eagle3, not with {self.method}")
        if self.model is None and has_model:
            raise FieldError(("model",), f"method {self.method} needs it")
        for key in sorted(self.model_fields_set):
            own = next((method for prefix, method in _PREFIXES.items() if key.startswith(prefix)), self.method)
            if own != self.method:
                raise FieldError((key,), f"goes with method {own}, not with {self.method}")
        return self

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            problem = f"{self.prompt_lookup_min} is over prompt_lookup_max {self.prompt_lookup_max}"
            raise FieldError(("prompt_lookup_min",), problem)
        return self


SpeculativeSetting = Annotated[SpeculativeConfig | None, BeforeValidator(parsed_json)]
