"""How right the router's predictions are on a live cluster, after a minute that began with a wrong profile."""

from dataclasses import dataclass

from pdserve.bench.errors import Accuracy, accuracy
from pdserve.bench.summary import Sample
from pdserve.experiments.lengths import Lengths
from pdserve.experiments.live import LiveCluster, Tell

_FULL_SHARE = 2 / 3  # of the calibration that finds the capacity
_CALIBRATION_LOAD = 0.6  # of the capacity, for the rest of it


@dataclass(frozen=True, slots=True)
class Trial:
    """What is done, and for how long."""

    lengths: Lengths
    loads: tuple[float, ...] = (0.3, 0.6, 0.9)  # shares of the capacity
    calibration_s: float = 60.0
    seconds: float = 60.0  # at each load
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came of it."""

    capacity_per_s: float
    runs: tuple[Accuracy, ...]
    samples: tuple[tuple[Sample, ...], ...]


async def predict(cluster: LiveCluster, trial: Trial, tell: Tell) -> Prediction:
    """Calibrate by load alone, then compare predictions at each load."""
    tell("calibrating: keeping the cluster full")
    full_s = _FULL_SHARE * trial.calibration_s
    capacity = await cluster.capacity(trial.lengths.requests, full_s, trial.seed)
    tell(f"capacity: {capacity:.2f} requests/s; calibrating at {_CALIBRATION_LOAD:.0%} of it")
    rest_s = trial.calibration_s - full_s
    await cluster.run(trial.lengths.poisson(_CALIBRATION_LOAD * capacity, rest_s, trial.seed), seed=trial.seed + 1)
    runs, all_samples = list[Accuracy](), list[tuple[Sample, ...]]()
    for number, load in enumerate(trial.loads, start=2):
        rate = load * capacity
        tell(f"measuring at {load:.0%} of the capacity, {rate:.2f} requests/s")
        arrivals = trial.lengths.poisson(rate, trial.seconds, trial.seed + number)
        samples = await cluster.run(arrivals, seed=trial.seed + number)
        runs.append(accuracy(f"{load:.0%}, {rate:.2f}/s", samples))
        all_samples.append(tuple(samples))
    return Prediction(capacity, tuple(runs), tuple(all_samples))
