"""Faults: what a run loses between checkpoints, and how often to write these."""

from __future__ import annotations

import numpy as np

from jaxbucket.simulate.cluster import Cluster

# Runs that are replayed for a result, and to compare intervals.
_RUNS, _FEW_RUNS = 200, 64
# Intervals that are compared, and the faults that are enough to compare them.
_INTERVALS, _ENOUGH_FAULTS = 40, 50
# After so many faults without a checkpoint in any run, none will come.
_FRUITLESS = 1000


def replay(
    work: float, interval: float, cluster: Cluster, num_runs: int = _RUNS
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
      num_runs: the number of runs.

    Returns:
      `[3, num_runs]` seconds: those in which checkpoints were written, those of steps
      that were lost in a fault since the last checkpoint, and those of restarts. They
      are infinite if no interval passes without a fault.
    """
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
    """Returns the number of steps between two checkpoints that loses least.

    Intervals around that of Young (1974), `sqrt(2 * checkpoint * mean gap)`, are
    replayed with the same faults.

    Args:
      work: the seconds of all steps.
      step: the mean seconds of a step.
      cluster: the machines.
    """
    mean = float(cluster.fault_gaps(np.random.default_rng(0), 10_000).mean())
    checkpoint = max(cluster.checkpoint_seconds, step / 100)
    young = np.sqrt(2 * checkpoint * mean) / step
    ratios = np.geomspace(1 / 8, 8, _INTERVALS)
    steps = np.unique(np.clip(np.rint(young * ratios), 1, max(1, work // step)))
    some = min(work, _ENOUGH_FAULTS * mean)
    costs = [replay(some, x * step, cluster, _FEW_RUNS).sum() for x in steps]
    return int(steps[np.argmin(costs)])
