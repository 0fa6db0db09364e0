"""The process that compiles clients' specifications, each in a fork of its own: one that crashes ends no other.

Reads lines of JSON: the tokenizer and end-of-sequence tokens, then specifications. Writes lines of JSON: null, or why
nothing can be compiled; then for each specification its number, an Outcome and a text, in any order. A fork has a low
priority, and ends at its limits of time, memory and stack. The stack is an eighth of that of workers' threads, where
the same specification is compiled again.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, Never

from pdserve.base.errors import GrammarError
from pdserve.grammar.compiler import Compiler, Outcome
from pdserve.protocol.sampling import StructuredOutput

STACK_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20  # of addresses, beside those of the process itself
NICENESS = 5
MAX_TEXT = 1000  # characters: a line is written at once, and forks write to one pipe
FIRST_CHOSEN = "1000"  # the kernel ends this process first when memory runs out

TOO_DEEP = f"it is nested too deeply to compile with {STACK_BYTES >> 20} MiB of stack"
TOO_MUCH_MEMORY = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory to compile"


def serve() -> None:
    """Answer until the input ends."""
    try:
        first = json.loads(sys.stdin.readline())
        compiler = Compiler(first["tokenizer"], first["eos_token_ids"])
    except GrammarError as error:
        _write(str(error))
        return
    running: dict[int, Any] = {}  # specifications, by the forks that compile them

    def reap(number: int, frame: FrameType | None) -> None:
        del number, frame
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                asked = running.pop(ended[0])
                if status := os.waitstatus_to_exitcode(ended[1]):
                    _write([asked["number"], *_said_by(status, asked)])

    signal.signal(signal.SIGCHLD, reap)
    _write(None)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        fork = os.fork()
        if not fork:
            _compile(compiler, asked)
        running[fork] = asked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _compile(compiler: Compiler, asked: dict[str, Any]) -> Never:
    status = 1
    try:
        os.nice(NICENESS)
        with suppress(OSError), open("/proc/self/statm", encoding="ascii") as sizes:  # Linux alone has it
            memory_bytes = int(sizes.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_limit_s"])
        outcome, text = Outcome.COMPILED, ""
        try:
            compiler.compile(StructuredOutput(asked["format"], tuple(asked["texts"])), tries=True)
        except GrammarError as error:
            outcome, text = Outcome.REFUSED, str(error)[:MAX_TEXT]
        except MemoryError:
            outcome, text = Outcome.OVER_LIMIT, TOO_MUCH_MEMORY
        _write([asked["number"], outcome, text])
        status = 0
    finally:
        os._exit(status)


def _said_by(status: int, asked: dict[str, Any]) -> tuple[Outcome, str]:
    """Return the outcome for a fork that ended with this status before it could answer."""
    match -status:
        case signal.SIGALRM:
            return Outcome.OVER_LIMIT, f"it takes longer than {asked['limit_s']:g} s to compile"
        case signal.SIGPROF:
            return Outcome.OVER_LIMIT, f"it takes more than {asked['cpu_limit_s']:g} s of a processor to compile"
        case signal.SIGSEGV:
            return Outcome.OVER_LIMIT, TOO_DEEP
        case signal.SIGABRT:  # how the allocator of llguidance ends
            return Outcome.OVER_LIMIT, TOO_MUCH_MEMORY
        case below_zero if below_zero < 0:  # an exception of the compiler's own
            return Outcome.REFUSED, "it cannot be compiled"
        case _:
            return Outcome.ENDED, f"the process that compiled it ended with status {status}"


def _write(answer: object) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Compile until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(FIRST_CHOSEN)
    serve()


if __name__ == "__main__":
    main()
