"""Run seeds of the fault simulator: `python -m faultsim --seeds 1000`."""

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial

from faultsim.simulation import Outcome, simulate

MAX_SHOWN = 5  # failing seeds whose story is told


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds asked for; return 1 where an invariant did not hold."""
    options = _parser().parse_args(arguments)
    logging.getLogger("pdserve").addHandler(logging.NullHandler())  # what simulated workers log has no operator
    seeds = range(options.first, options.first + options.seeds)
    started_s, started_processor_s = time.monotonic(), _processor_s()
    num_messages, ends, failed = 0, Counter[str](), []
    with _map(options.jobs, partial(simulate, num_requests=options.requests), seeds) as outcomes:
        for number, outcome in enumerate(outcomes, 1):
            num_messages += outcome.num_messages
            ends.update(outcome.ends)
            if outcome.violation:
                failed.append(outcome)
                _tell(outcome, with_story=len(failed) <= MAX_SHOWN)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{number} of {len(seeds)} seeds")
    elapsed_s, processor_s = time.monotonic() - started_s, _processor_s() - started_processor_s
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(ends.items()))
    sys.stdout.write(
        f"{len(seeds)} seeds, {len(failed)} failed, {elapsed_s:.1f} s: {len(seeds) / elapsed_s:.1f} seeds/s, "
        f"{num_messages / elapsed_s:,.0f} messages/s, {num_messages / processor_s:,.0f} a second and core\n"
        f"ends: {kinds}\n"
    )
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m faultsim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--requests", type=int, default=200, help="requests in each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="seeds that run at once")
    return parser


def _processor_s() -> float:
    """Return the processor time spent by this process, and by those it started and has seen end."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@contextmanager
def _map(jobs: int, run: partial[Outcome], seeds: Iterable[int]) -> Iterator[Iterator[Outcome]]:
    """Run seeds in this process, or in several; outcomes come in the order of seeds."""
    if jobs == 1:
        yield map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield pool.map(run, seeds, chunksize=4)


def _tell(outcome: Outcome, *, with_story: bool) -> None:
    if with_story:
        sys.stdout.write("".join(f"{line[:400]}\n" for line in outcome.story))
    sys.stdout.write(f"seed {outcome.seed} after {outcome.virtual_s:.3f} s: {outcome.violation}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
