"""What an engine step costs, as a sum of what it computes. Pure.

A prefill step takes `step + each * tokens + context * work`, a decode step `step + each * sequences + context *
kv_tokens`. A step that does both reads the weights once: it pays the larger `step`, and both other parts.
"""

from dataclasses import dataclass

from pdserve.base.values import value

# Observed steps after which a curve is trusted, and is moved by so many together: solving takes longer than all else
# that a step brings. With 32, simulated clusters attain 3 points less: decode workers compute few prompts.
ENOUGH_STEPS = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """Coefficients of one kind of step, seconds. None is negative."""

    step_s: float
    each_s: float  # a prompt token; a sequence that decodes
    context_s: float  # a unit of attention work; a KV token read

    def seconds(self, each: float, context: float) -> float:
        return self.step_s + self.each_s * each + self.context_s * context

    def scaled(self, factor: float) -> "Curve":
        """Return the curve of steps that take so many times as long."""
        return Curve(factor * self.step_s, factor * self.each_s, factor * self.context_s)

    def marginal_s(self, each: float, context: float) -> float:
        """Return what it adds to a step that happens anyway."""
        return self.each_s * each + self.context_s * context


def attention_work(num_tokens: int, start: int) -> int:
    """Return the work of attention over a prompt's chunk. Chunks add up: those of a whole prompt to its square."""
    return num_tokens * (2 * start + num_tokens)


@value
class Step:
    prefill_tokens: int = 0
    prefill_work: int = 0
    sequences: int = 0  # that decode; the guesses of each count as sequences too
    kv_tokens: int = 0  # that they read
    guesses: int = 0  # among these sequences
    kept_guesses: int = 0  # tokens gained beyond one a sequence


IDLE = Step()


@value
class TimedStep:
    """What a step computed, and how long that took."""

    step: Step
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class DecodePiece:
    max_sequences: int | None  # None: for all larger ones
    curve: Curve


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured costs of one configuration of a worker."""

    prefill: Curve
    decode: tuple[DecodePiece, ...]  # by rising max_sequences; the last holds for the rest

    def decode_curve(self, sequences: int) -> Curve:
        for piece in self.decode[:-1]:
            if piece.max_sequences is not None and sequences <= piece.max_sequences:
                return piece.curve
        return self.decode[-1].curve

    def scaled(self, factor: float) -> "StepCosts":
        """Return the costs of steps that take so many times as long."""
        pieces = tuple(DecodePiece(piece.max_sequences, piece.curve.scaled(factor)) for piece in self.decode)
        return StepCosts(self.prefill.scaled(factor), pieces)

    def seconds(self, step: Step) -> float:
        if not step.prefill_tokens:
            return self.decode_curve(step.sequences).seconds(step.sequences, step.kv_tokens)
        prefill_s = self.prefill.seconds(step.prefill_tokens, step.prefill_work)
        if not step.sequences:
            return prefill_s
        decode = self.decode_curve(step.sequences)
        fixed_s = max(0.0, decode.step_s - self.prefill.step_s)
        return prefill_s + fixed_s + decode.marginal_s(step.sequences, step.kv_tokens)
