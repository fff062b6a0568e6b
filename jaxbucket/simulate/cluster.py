"""`Cluster`: what takes how long on the machines of a run."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_float, check_positive
from jaxbucket.plan.costs import SECONDS, CostFn

# A number with a distribution that an attribute describes, or `[n]` measured values,
# which are equally likely.
Measured: TypeAlias = float | ArrayLike
# Normally distributed numbers by their shares, which are below 1.
_QUANTILE, _MOST = statistics.NormalDist().inv_cdf, 1 - 1e-16
_SECONDS_PER_HOUR, _LEAST_HOURS = 3600.0, 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """The machines of a run, and how long they take.

    Attributes that may be arrays are distributions: `[n]` measured values, of which
    each is equally likely at every step of every host.

    Example: 512 hosts, each of which has a fault every 20,000 hours.
      >>> cluster = Cluster(num_hosts=512, hours_between_faults=20_000)
      >>> round(cluster.fault_gaps(np.random.default_rng(0), 10_000).mean() / 3600)
      39

    Attributes:
      num_hosts: the number of hosts.
      devices_per_host: the number of devices of each.
      step_seconds: `(batch_size, seq_len)` -> the mean seconds that a host computes in
        a step of this global batch, such as the `Calibration.cost` of all hosts; None
        for the costs of the plan, which are then in seconds.
      skew: how the times of hosts differ in a step: the standard deviation of their
        logarithm, or measured factors of the mean host of the same step. All hosts wait
        for the slowest one in every step. 0 if `step_seconds` are of steps on all
        hosts, which include this.
      row_seconds: the seconds that a host needs to load a row of a batch, with all of
        its workers; or those of measured rows. The next batch is loaded during a step.
      compile_seconds: the seconds to compile the program of one shape; 0 if this was
        done ahead of time.
      hours_between_faults: the mean hours until a host fails, which are distributed
        exponentially; or measured hours, of which several hosts need only the mean;
        None without faults. Any fault stops all hosts.
      restart_seconds: the seconds from a fault to the next step.
      checkpoint_seconds: the seconds for which training waits while a checkpoint is
        written.
      checkpoint_steps: the number of steps between two checkpoints; None for the one
        that loses least, or for no checkpoints if there are no faults.

    Raises:
      ValueError: if a number is out of range.
    """

    num_hosts: int = 1
    devices_per_host: int = 1
    step_seconds: CostFn | None = None
    skew: Measured = 0.0
    row_seconds: Measured = 0.0
    compile_seconds: float = 0.0
    hours_between_faults: Measured | None = None
    restart_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoint_steps: int | None = None

    def __post_init__(self):
        for name in ("num_hosts", "devices_per_host", "checkpoint_steps"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_positive(name, value))
        for name in ("compile_seconds", "restart_seconds", "checkpoint_seconds"):
            check_float(name, getattr(self, name), least=0)
        least = {"skew": 0.0, "row_seconds": 0.0, "hours_between_faults": _LEAST_HOURS}
        for name in least:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _checked(name, value, least[name]))

    @property
    def num_devices(self) -> int:
        """The number of devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def seconds(self, plan: BucketPlan) -> np.ndarray:
        """Returns the mean seconds of a batch of each bucket on a host, `[K]`."""
        if self.step_seconds is None:
            if plan.cost_unit != SECONDS:
                raise ValueError(
                    f"The costs of `plan` are in {plan.cost_unit}. Pass `step_seconds`"
                    ", on the command line --step-times or --per-second."
                )
            return np.asarray(plan.costs, np.float64)
        step = self.step_seconds
        return np.array(
            [
                check_float(f"step_seconds of {x}", step(x.batch_size, x.seq_len))
                for x in plan.buckets
            ]
        )

    def slowest(
        self, rng: np.random.Generator, number: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns draws of how much longer a step and loading take on the slowest host.

        Returns:
          `[number]` factors of `step_seconds` on the slowest host; and `[number]`
          numbers of standard deviations by which the slowest loader is above its mean.
        """
        # The largest of H uniform numbers is distributed as U ** (1 / H).
        shares = rng.random((2, number)) ** (1 / self.num_hosts)
        deviations = np.array(
            [[*map(_QUANTILE, np.clip(x, 1e-300, _MOST))] for x in shares]
        )
        skew = np.asarray(self.skew, np.float64)
        if skew.ndim:
            slowest = np.quantile(skew, shares[0], method="inverted_cdf")
            return slowest, deviations[1]
        # The mean of the factors of all hosts is 1.
        return np.exp(skew * deviations[0] - skew**2 / 2), deviations[1]

    @property
    def mean_factor(self) -> float:
        """The mean factor of `step_seconds`."""
        skew = np.asarray(self.skew, np.float64)
        return float(skew.mean()) if skew.ndim else 1.0

    @property
    def mean_fault_gap(self) -> float:
        """The mean seconds until the first host fails."""
        if self.hours_between_faults is None:
            return float(np.finfo(np.float64).max)
        hours = np.asarray(self.hours_between_faults, np.float64)
        return float(hours.mean()) * _SECONDS_PER_HOUR / self.num_hosts

    def fault_gaps(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """Returns draws of the seconds until the first host fails, `[number]`.

        Of several hosts, whose times since their last fault differ, faults are
        distributed exponentially (Palm and Khintchine's theorem).
        """
        if self.hours_between_faults is None:
            return np.full(number, self.mean_fault_gap)
        if np.ndim(self.hours_between_faults) and self.num_hosts == 1:
            return rng.choice(self.hours_between_faults, number) * _SECONDS_PER_HOUR
        return rng.exponential(self.mean_fault_gap, number)


def _checked(name: str, value: Any, least: float) -> float | np.ndarray:
    """Returns a number from `least`, or `[n]` of them."""
    values = np.asarray(value)
    if values.ndim == 0:
        return check_float(name, value, least=least)
    is_valid = values.ndim == 1 and values.size and values.dtype.kind in "iuf"
    if not is_valid or not np.isfinite(values).all() or (values < least).any():
        raise ValueError(
            f"`{name}={value!r}`: pass a number, or [n] finite numbers, from {least}."
        )
    return values.astype(np.float64)
