"""A request's sampling parameters, with the limits that every part of the system relies on; and sampled tokens."""

from dataclasses import dataclass
from struct import unpack
from typing import Literal

from pdserve.base.values import value
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.refusal import invalid

MAX_LOGPROBS = 20
MAX_SEQUENCES = 8
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 1024
MAX_STRUCTURED_BYTES = 65_536  # in UTF-8, of all texts of one specification
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128  # strings of a request, each at most MAX_BAD_WORD_BYTES long in UTF-8
MAX_BAD_WORD_BYTES = 128
MAX_BAD_WORD_IDS = 2 * MAX_BAD_WORDS  # sequences: a word's with a space before it and without
MAX_BAD_WORD_TOKENS = 2 * MAX_BAD_WORD_BYTES  # of one sequence
GREEDY_BELOW = 1e-5  # temperatures; logits divided by less may overflow float32


Format = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@value
class StructuredOutput:
    """What an answer's text must match. `texts`: the choices, nothing for json_object, else one text."""

    format: Format
    texts: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Its name in errors."""
        return f"structured_output.{self.format}"

    def validate(self) -> None:
        """Raise RefusedError(INVALID_ARGUMENT) for too much or too little text. The text itself is not parsed."""
        if self.format == "choice":
            _in_range(f"{self.field} entries", len(self.texts), 1, MAX_CHOICES)
        if not all(self.texts):
            raise invalid(self.field, "it is empty, at least 1 character is needed")
        num_bytes = sum(len(text.encode()) for text in self.texts)
        if num_bytes > MAX_STRUCTURED_BYTES:
            raise invalid(self.field, f"{num_bytes} bytes are over the limit of {MAX_STRUCTURED_BYTES}")


@value
class SamplingParams:
    """One request's sampling. Defaults are the OpenAI API's; a temperature below GREEDY_BELOW means greedy.

    A worker always gets a seed: the router draws one if the client sent none, so that hand-off, preemption and
    migration cannot change an output.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # 64 bits
    logprobs: int | None = None  # number of likeliest tokens to report; 0: only the chosen one
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    prompt_logprobs: int | None = None  # as `logprobs`, for the prompt's tokens
    allowed_token_ids: tuple[int, ...] = ()  # only these may be sampled; empty: all
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # sequences that may not be sampled
    structured_output: StructuredOutput | None = None
    pooling: Pooling | None = None  # in place of an answer: max_tokens is 1, and no token is sampled

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise RefusedError(INVALID_ARGUMENT) naming the first field out of range, its value and the limit."""
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, vocab_size)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("n", self.n, 1, MAX_SEQUENCES)
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _in_range("logit_bias entries", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
        for token, bias in self.logit_bias:
            _in_range("logit_bias token", token, 0, vocab_size - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)
        _in_range("stop_token_ids entries", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        for token in self.stop_token_ids:
            _in_range("stop_token_ids", token, 0, vocab_size - 1)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._validate_vocabulary(vocab_size)
        if self.structured_output is not None:
            self.structured_output.validate()
            if self.ignore_eos:
                raise invalid("ignore_eos", "true, but an answer with a structured_output ends once it is complete")
        if self.pooling is not None:
            _in_range("max_tokens of pooling", self.n * self.max_tokens, 1, 1)
            self.pooling.validate(vocab_size)

    def _validate_vocabulary(self, vocab_size: int) -> None:
        """Raise RefusedError if allowed or banned tokens are out of range, or no token may be sampled."""
        _in_range("allowed_token_ids entries", len(self.allowed_token_ids), 0, MAX_ALLOWED_TOKEN_IDS)
        for token in self.allowed_token_ids:
            _in_range("allowed_token_ids", token, 0, vocab_size - 1)
        _in_range("bad_word_ids entries", len(self.bad_word_ids), 0, MAX_BAD_WORD_IDS)
        for word in self.bad_word_ids:
            _in_range("bad_word_ids tokens", len(word), 1, MAX_BAD_WORD_TOKENS)
            for token in word:
                _in_range("bad_word_ids", token, 0, vocab_size - 1)
        banned = {word[0] for word in self.bad_word_ids if len(word) == 1}
        banned.update(self.stop_token_ids if self.min_tokens else ())
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            raise invalid("allowed_token_ids", "bad words and stop tokens leave none of them to be sampled")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural, of the model's raw distribution) at one position."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@value
class PromptLogprobs:
    """Log probabilities of successive prompt tokens, packed as they travel: little-endian, one row a token."""

    chosen: bytes  # float32 [num_tokens]
    top_ids: bytes  # uint32 [num_tokens, num_top], likeliest first
    top: bytes  # float32 [num_tokens, num_top]

    def __len__(self) -> int:
        return len(self.chosen) // 4

    @property
    def num_top(self) -> int:
        return len(self.top) // len(self.chosen)

    @property
    def num_bytes(self) -> int:
        return len(self.chosen) + 2 * len(self.top)

    def slice(self, start: int, stop: int) -> "PromptLogprobs":
        """Return those of the tokens from `start` to before `stop`."""
        first, last = 4 * start * self.num_top, 4 * stop * self.num_top
        return PromptLogprobs(self.chosen[4 * start : 4 * stop], self.top_ids[first:last], self.top[first:last])

    def entries(self) -> list[TokenLogprobs]:
        count, num_top = len(self), self.num_top
        chosen = unpack(f"<{count}f", self.chosen)
        pairs = list(
            zip(unpack(f"<{count * num_top}I", self.top_ids), unpack(f"<{count * num_top}f", self.top), strict=True)
        )
        return [TokenLogprobs(chosen[row], tuple(pairs[row * num_top : (row + 1) * num_top])) for row in range(count)]


@value
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


def _in_range(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        shown = float(f"{value:.7g}") if isinstance(value, float) else value  # float32 has 7 digits
        raise invalid(field, f"{shown} is outside {bracket}{low}, {high}]")
