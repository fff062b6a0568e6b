"""Faults: what a run loses between checkpoints, and how often to write these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

# (random numbers, number) -> `[number]` seconds until the next fault.
Gaps: TypeAlias = Callable[[np.random.Generator, int], np.ndarray]
# Runs that are replayed for a result, and to compare intervals.
_RUNS, _FEW_RUNS = 200, 64
# Intervals that are compared, and the faults that are enough to compare them.
_INTERVALS, _ENOUGH_FAULTS = 40, 50
# After so many faults without a checkpoint in any run, none will come.
_FRUITLESS = 1000


@dataclasses.dataclass(frozen=True)
class Replay:
    """Runs with random faults, `[n]` seconds each.

    Attributes:
      checkpoints: seconds in which checkpoints were written.
      lost: seconds of steps that were repeated after a fault, since the last
        checkpoint.
      restarts: seconds of restarts.
    """

    checkpoints: np.ndarray
    lost: np.ndarray
    restarts: np.ndarray

    @property
    def overhead(self) -> np.ndarray:
        """`[n]` seconds, the sum of all of these."""
        return self.checkpoints + self.lost + self.restarts


def replay(
    work: float,
    interval: float,
    checkpoint: float,
    restart: float,
    gaps: Gaps,
    num_runs: int = _RUNS,
) -> Replay:
    """Replays runs until their work is done.

    Example: a fault after 103 seconds, 10 seconds after the third checkpoint. The
    checkpoints, one every 30 seconds of steps, take 1 second each.
      >>> runs = replay(180, 30, 1, 5, lambda rng, number: np.full(number, 103.0), 1)
      >>> runs.checkpoints.item(), runs.lost.item(), runs.restarts.item()
      (5.0, 10.0, 5.0)

    Args:
      work: the seconds of all steps.
      interval: the seconds of steps between two checkpoints.
      checkpoint: the seconds to write one.
      restart: the seconds after a fault until steps go on. A fault does not come in
        these.
      gaps: draws the seconds until the next fault.
      num_runs: the number of runs.
    """
    rng = np.random.default_rng(0)
    left = np.full(num_runs, float(work))
    totals = np.zeros((3, num_runs))
    active = np.arange(num_runs)
    fruitless = 0
    while len(active) and fruitless < _FRUITLESS:
        gap, to_do = gaps(rng, num_runs)[active], left[active]
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
    return Replay(*totals)


def best_interval(
    work: float, step: float, checkpoint: float, restart: float, gaps: Gaps
) -> int:
    """Returns the number of steps between two checkpoints that loses least.

    Intervals around that of Young (1974), `sqrt(2 * checkpoint * mean gap)`, are
    replayed with the same faults.

    Args:
      work: the seconds of all steps.
      step: the mean seconds of a step.
      checkpoint, restart, gaps: as for `replay`.
    """
    mean = float(gaps(np.random.default_rng(0), 10_000).mean())
    young = np.sqrt(2 * max(checkpoint, step / 100) * mean) / step
    ratios = np.geomspace(1 / 8, 8, _INTERVALS)
    steps = np.unique(np.clip(np.rint(young * ratios), 1, max(1, work // step)))
    some = min(work, _ENOUGH_FAULTS * mean)
    overheads = [
        replay(some, x * step, checkpoint, restart, gaps, _FEW_RUNS).overhead.mean()
        for x in steps
    ]
    return int(steps[np.argmin(overheads)])
