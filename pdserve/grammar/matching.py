"""Grammars of a worker's sequences: compiled once each, in a thread, and followed token by token."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock

import llguidance
import numpy as np
import numpy.typing as npt

from pdserve.base.errors import GrammarError
from pdserve.grammar.compiler import Compiler, reason
from pdserve.protocol.sampling import StructuredOutput

MAX_KEPT = 64  # compiled specifications; sequences keep those in use

Bits = npt.NDArray[np.int32]
Compiled = Future[llguidance.LLMatcher]


class Matching:
    """One continuation's place in its grammar: a `Matcher` of the engine.

    It remembers the consumed tokens. If an output does not begin with them, it goes back to where they differ: guesses
    are asked about that turn out wrong.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher: llguidance.LLMatcher | None = None
        self._consumed = array("q")

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    def fill(self, output_ids: Sequence[int], bits: Bits) -> None:
        """Write the mask of the tokens that may follow; GrammarError if none can."""
        matcher = self._following(output_ids)
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        if matcher.is_error():
            self._matcher, self._consumed = None, array("q")  # an error stays
            raise GrammarError(reason(matcher))
        size = min(len(mask), len(bits))
        bits[:size] = mask[:size]
        if not bits.any():
            raise GrammarError("what may follow is not in the model's vocabulary")

    def _following(self, output_ids: Sequence[int]) -> llguidance.LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        tokens = array("q", output_ids)
        start = _num_same(self._consumed, tokens)
        if start < len(self._consumed) and not self._matcher.rollback(len(self._consumed) - start):
            self._matcher, start = self._compiled.result().deep_copy(), 0
        fresh = tokens[start:].tolist()
        num_consumed = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._consumed = tokens[: start + num_consumed]
        if num_consumed < len(fresh):
            raise GrammarError("nothing matches it")
        return self._matcher


def _num_same(consumed: "array[int]", tokens: "array[int]") -> int:
    """Return how many tokens at the beginning are the same."""
    size = min(len(consumed), len(tokens))
    differ = np.frombuffer(consumed, np.int64, size) != np.frombuffer(tokens, np.int64, size) if size else ()
    return int(np.argmax(differ)) if np.any(differ) else size


class Grammars:
    """The grammars that a worker has compiled, or is compiling."""

    def __init__(self, compiler: Callable[[], Compiler], on_compiled: Callable[[], None]) -> None:
        """`compiler` is called at once, in the thread that compiles; `on_compiled` there, after each grammar."""
        self._on_compiled = on_compiled
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._compiler = self._thread.submit(compiler)
        self._kept: OrderedDict[StructuredOutput, Compiled] = OrderedDict()
        self._lock = Lock()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def compile(self, structured: StructuredOutput) -> Callable[[], Matching]:
        """Begin to compile a specification; return what makes the matcher of each of its continuations."""
        with self._lock:
            compiled = self._kept.get(structured)
            if compiled is None:
                compiled = self._kept[structured] = self._thread.submit(self._compile, structured)
                compiled.add_done_callback(lambda _: self._on_compiled())
            self._kept.move_to_end(structured)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return partial(Matching, compiled)

    def _compile(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        return self._compiler.result().compile(structured)
