"""Launches a step on a device while the device computes the step before.

To launch a step takes the host a good part of a millisecond. If the host waited for the step before, the device would
wait for the host, once a token. What cannot be launched is computed by itself, once all that was launched is over.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import replace
from threading import Condition

from pdserve.base.errors import DeviceError, InvariantError
from pdserve.engine.drafting import Drafter
from pdserve.engine.runner import LaunchingRunner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.failing import Isolating, Run

logger = logging.getLogger(__name__)

PACED_TOKENS = 512  # for so many of its tokens a step takes `test_step_s` longer


def paced(compute: Run, step_s: float) -> Run:
    """Return what computes a step, and then waits until it has taken `step_s` and the time of its tokens."""
    if not step_s:
        return compute

    def run_and_wait(plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        result = compute(plan)
        if plan.chunks:  # else pages are copied for the step that follows
            least_s = step_s * (1 + plan.num_tokens / PACED_TOKENS)
            time.sleep(max(0.0, began_s + least_s - time.perf_counter()))
        return replace(result, elapsed_s=time.perf_counter() - began_s)

    return run_and_wait


class Launches:
    """Steps on their way through a device.

    A step that cannot be launched is computed by itself, and fails only the requests that make it fail. Its pages are
    copied again then: what was written to one meanwhile lies behind what its copy keeps. If a launched step fails,
    nobody can find the request that is at fault: DeviceError. A step that verifies guesses, or behind which some are
    made, is computed by itself, too: none is planned ahead of its result.
    """

    def __init__(self, runner: LaunchingRunner, steps: Isolating, drafter: Drafter | None = None) -> None:
        self._runner, self._drafter = runner, drafter
        self._steps = steps
        self._is_on_device = False  # what the step before has drawn
        self._num_in_flight = 0
        self._one_is_over = Condition()

    def launch(self, plan: StepPlan) -> StepResult | None:
        """Launch a step, in the engine's thread; return its result if it was computed by itself."""
        is_known = self._is_on_device or all(chunk.previous is None for chunk in plan.chunks)
        if is_known and not plan.has_guesses and not plan.has_drafts:
            try:
                self._runner.start(plan)
            except InvariantError:
                raise
            except Exception:
                logger.exception("a step of %d sequences was not launched", len(plan.chunks))
            else:
                self._is_on_device = True
                with self._one_is_over:
                    self._num_in_flight += 1
                return None
        with self._one_is_over:
            self._one_is_over.wait_for(lambda: not self._num_in_flight)
        result = self._steps.run(plan)
        self._is_on_device = self._steps.is_whole
        return result

    def finish(self, launched: "Future[StepResult | None]") -> StepResult:
        """Wait for a step. In a thread of its own, in the order of launches."""
        result = launched.result()
        if result is not None:
            return result
        try:
            result = self._runner.finish()
        except InvariantError:
            raise
        except Exception as error:
            raise DeviceError(f"a step that was launched failed: {type(error).__name__}: {error}") from error
        else:
            self._steps.drawn = result.tokens
            return result if self._drafter is None else self._drafter.told(result)
        finally:
            with self._one_is_over:
                self._num_in_flight -= 1
                self._one_is_over.notify()
