"""Faults: what a run loses between checkpoints, and how often to write these."""

from __future__ import annotations

import numpy as np

from jaxbucket.simulate.cluster import Cluster

# Runs that are replayed at least, and the faults in them, if these are rare.
_RUNS, _FAULTS = 200, 20_000
# Intervals that are compared.
_INTERVALS = 400
# After so many faults without a checkpoint in any run, none will come.
_FRUITLESS = 1000


def replay(
    work: float, interval: float, cluster: Cluster, num_runs: int | None = None
) -> np.ndarray:
    """Replays runs until their work is done.

    Example: a fault after 103 seconds, 10 seconds after the third checkpoint. The
    checkpoints, one every 30 seconds of steps, take 1 second each.
      >>> cluster = Cluster(
      ...     hours_between_faults=[103 / 3600], restart_seconds=5, checkpoint_seconds=1
      ... )
      >>> replay(180, 30, cluster, num_runs=1).round().tolist()
      [[5.0], [10.0], [5.0]]

    Args:
      work: the seconds of all steps.
      interval: the seconds of steps between two checkpoints.
      cluster: the machines. No fault comes during a restart.
      num_runs: the number of runs; by default at least 200, more if faults are rare.

    Returns:
      `[3, num_runs]` seconds: those in which checkpoints were written, those of steps
      that were lost in a fault since the last checkpoint, and those of restarts. They
      are infinite if no interval passes without a fault.
    """
    if num_runs is None:
        num_runs = _RUNS + int(_FAULTS / (1 + work / cluster.mean_fault_gap))
    rng = np.random.default_rng(0)
    checkpoint, restart = cluster.checkpoint_seconds, cluster.restart_seconds
    left = np.full(num_runs, float(work))
    totals = np.zeros((3, num_runs))
    active = np.arange(num_runs)
    fruitless = 0
    while len(active) and fruitless < _FRUITLESS:
        gap, to_do = cluster.fault_gaps(rng, num_runs)[active], left[active]
        # No checkpoint follows the last step.
        needed = to_do + checkpoint * np.ceil(to_do / interval - 1)
        is_done = needed <= gap
        cycles = np.where(
            is_done, np.ceil(to_do / interval - 1), gap // (interval + checkpoint)
        )
        lost = np.where(is_done, 0, gap - cycles * (interval + checkpoint))
        parts = [cycles * checkpoint, lost, np.where(is_done, 0, restart)]
        totals[:, active] += parts
        left[active] = np.where(is_done, 0, to_do - cycles * interval)
        fruitless = 0 if cycles.any() or is_done.any() else fruitless + 1
        active = active[~is_done]
    totals[:, active] = np.inf
    return totals


def best_interval(work: float, step: float, cluster: Cluster) -> int:
    """Returns the number of steps between two checkpoints that loses least on average.

    If faults are distributed exponentially, `x` seconds that are repeated after every
    fault take `(mean gap + restart) * expm1(x / mean gap)` on average (Daly, 2006, "A
    higher order estimate of the optimum checkpoint interval"). Compared are even parts
    of the work, about as long as Young's (1974), `sqrt(2 * checkpoint * mean gap)`.

    Args:
      work: the seconds of all steps.
      step: the mean seconds of a step.
      cluster: the machines.
    """
    mean, checkpoint = cluster.mean_fault_gap, cluster.checkpoint_seconds
    young = np.sqrt(2 * max(checkpoint, step / 100) * mean)
    num_steps = max(1, round(work / step))
    parts = np.rint(work / young * np.geomspace(1 / 8, 8, _INTERVALS))
    interval = np.unique(np.ceil(num_steps / np.clip(parts, 1, num_steps)))
    # No checkpoint follows the last part.
    whole = np.ceil(num_steps / interval) - 1
    last = num_steps - whole * interval
    with np.errstate(over="ignore"):
        costs = whole * np.expm1((interval * step + checkpoint) / mean)
        costs += np.expm1(last * step / mean)
    return int(interval[np.argmin(costs)])
