"""The process that compiles what clients send, so that its end is nobody else's.

Reads lines of JSON: first the tokenizer and the ends of answers, then a specification each. Writes a line for each:
null, or what is wrong with it. Its memory is limited, and the stack of the thread that compiles is an eighth of those
of workers, in which what was compiled here is compiled again.
"""

import json
import resource
import sys
import threading

from pdserve.errors import GrammarError
from pdserve.grammar.compiler import Compiler
from pdserve.sampling import StructuredOutput

STACK_BYTES = 1 << 20
MEMORY_BYTES = 4 << 30  # of addresses: llguidance itself reserves hundreds of megabytes


def serve() -> None:
    """Answer until the input ends."""
    try:
        first = json.loads(sys.stdin.readline())
        compiler = Compiler(first["tokenizer"], first["eos_token_ids"])
    except GrammarError as error:
        _write(str(error))
        return
    _write(None)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            compiler.compile(StructuredOutput(asked["format"], tuple(asked["texts"])))
        except GrammarError as error:
            _write(str(error))
        except MemoryError:
            _write("it takes too much memory to compile")
        else:
            _write(None)


def _write(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, name="compile")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
