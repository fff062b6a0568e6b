"""`Simulation`: simulated epochs, and how they are printed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.table import Record, format_duration, number_table
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.reports.epoch import Report
from jaxbucket.simulate.cluster import Cluster

PARTS = {
    "steps": "the mean host computes",
    "waiting": "for the slowest host",
    "data": "for batches that are not loaded yet",
    "compile": "programs are compiled",
    "checkpoints": "checkpoints are written",
    "lost": "steps are repeated after a fault",
    "restarts": "after a fault, until steps go on",
}
# Steps with so many times the tokens of those that were timed are far from them.
_FAR = 2
_LEGEND = (
    "Epoch: its predicted time; with faults the mean, which can be above the range of "
    "90% of epochs if faults are rare. The other columns are shares of this time: "
    + "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    + "."
)


@dataclasses.dataclass(frozen=True)
class SimulatedEpoch:
    """The first epoch of a plan on a cluster.

    Attributes:
      plan: the shapes.
      report: the steps, examples and padding of the epoch.
      parts: the mean seconds of each part of the epoch: "steps", "waiting", "data",
        "compile", "checkpoints", "lost" and "restarts".
      seconds: the mean seconds of the epoch, the sum of its parts.
      range: the 5th and the 95th percentile of the seconds, over random faults.
      without_fault: the share of epochs without a fault.
      checkpoint_steps: the steps between two checkpoints; None without checkpoints.
      balance: the real tokens of the device that has most of them in a batch, divided
        by those of the mean device, averaged over the batches; None if examples have
        several sequences, or devices no whole rows.
      steps: arrays with an element for each of some steps, about equally far from each
        other: "step", "examples", "positions" (padding included), "tokens" (the mean
        number of real ones), "seconds", and "learning_rate" if there is one.
    """

    plan: BucketPlan
    report: Report
    parts: dict[str, float]
    range: tuple[float, float]
    without_fault: float
    checkpoint_steps: int | None
    balance: float | None
    steps: dict[str, np.ndarray]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Returns the share of a part in the time of the epoch."""
        return self.parts[part] / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "seconds": self.seconds,
            "range": list(self.range),
            "without_fault": self.without_fault,
            "parts": self.parts,
            "checkpoint_steps": self.checkpoint_steps,
            "balance": self.balance,
            "report": self.report.to_dict(),
            "steps": {name: x.tolist() for name, x in self.steps.items()},
        }


@dataclasses.dataclass(frozen=True)
class Simulation(Record):
    """The simulated epochs of one or several plans.

    Attributes:
      epochs: the name of each plan -> its epoch.
      cluster: the machines.
    """

    epochs: dict[str, SimulatedEpoch]
    cluster: Cluster

    def __getitem__(self, name: str) -> SimulatedEpoch:
        return self.epochs[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {name: epoch.to_dict() for name, epoch in self.epochs.items()}

    @property
    def legends(self) -> tuple[str, ...]:
        return (_LEGEND,)

    def __rich__(self) -> Any:
        """Returns the epochs as a `rich` table, for a terminal."""
        epochs = self.epochs.values()
        used = [part for part in PARTS if any(x.parts[part] for x in epochs)]
        names = ["plan", "shapes", "steps per\nepoch", "padding", "epoch", *used]
        rows = [
            (
                name,
                str(len(x.plan)),
                f"{x.report.steps_per_epoch:,}",
                f"{x.report.padding:.1%}",
                format_duration(x.seconds),
                *(f"{x.share(part):.1%}" for part in used),
            )
            for name, x in self.epochs.items()
        ]
        remarks = {x: [*_sentences(y, self.cluster)] for x, y in self.epochs.items()}
        text = [f"{name}: {' '.join(x)}" for name, x in remarks.items() if x]
        caption = "\n".join([*text, *self.legends])
        return number_table(names, rows, caption, named=True)


def _range(epoch: SimulatedEpoch, has_faults: bool) -> str:
    """Returns how long epochs take, and how many of them have no fault."""
    low, high = map(format_duration, epoch.range)
    if not has_faults:
        return f"an epoch takes {low}"
    share = f"{epoch.without_fault:.1%}".replace("100.0%", "more than 99.9%")
    if low == high and epoch.without_fault > 0.5:
        return f"{share} of epochs have no fault and take {low}"
    takes = low if low == high else f"{low} to {high}"
    return f"90% of epochs take {takes}, and {share} have no fault"


def _sentences(epoch: SimulatedEpoch, cluster: Cluster) -> Iterator[str]:
    """Yields what the table does not say about an epoch."""
    if epoch.checkpoint_steps is not None:
        between = epoch.checkpoint_steps * epoch.steps["seconds"].mean()
        interval = epoch.checkpoint_steps
        steps = f"{interval:,} steps" if interval > 1 else "step"
        checkpoints = f"a checkpoint every {steps} ({format_duration(between)})"
        if epoch.checkpoint_steps >= epoch.report.steps_per_epoch:
            checkpoints = "no checkpoint before the end"
        chosen = "" if cluster.checkpoint_steps else ", which loses least"
        if chosen and not cluster.checkpoint_seconds:
            chosen = " (checkpoints take no time; pass `checkpoint_seconds`)"
        takes = _range(epoch, cluster.hours_between_faults is not None)
        yield f"By these step times, {takes}, with {checkpoints}{chosen}."
    number = cluster.num_devices
    uneven = [x for x in epoch.plan.buckets if x.batch_size % number]
    if uneven:
        yield (
            f"B, that of all hosts, is no multiple of the {number:,} devices in "
            f"{len(uneven)} of the shapes, such as {uneven[0]}. Plan with "
            f"`batch_size_multiple={number}`, unless devices share rows."
        )
    step, largest = cluster.step_seconds, max(x.num_tokens for x in epoch.plan.buckets)
    timed = step.measured if isinstance(step, StepTime) else {}
    factor = largest / max(map(math.prod, timed), default=largest)
    if factor > _FAR and cluster.num_hosts > 1:
        yield (
            f"Its steps have up to {factor:,.0f} times the tokens of those that were "
            "timed. Pass times of global batches: B is that of all hosts."
        )
    if epoch.balance is not None and number > 1:
        yield (
            f"The device with most real tokens has {epoch.balance:.2f} times the mean. "
            "It takes longer than others only where a kernel skips padding."
        )
