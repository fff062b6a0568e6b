"""What an iterator of a stream goes by."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import grain

from jaxbucket.base.peers import Meeting
from jaxbucket.base.types import BucketPlan
from jaxbucket.data.example import Example
from jaxbucket.data.transform import StreamTransform
from jaxbucket.stream.drift import OnDrift
from jaxbucket.stream.options import Options
from jaxbucket.stream.phases import Phase


@dataclasses.dataclass(frozen=True)
class StreamRun:
    """What an iterator goes by.

    Attributes:
      open_epoch: returns the stream of an epoch.
      phases: the plans, by their first steps.
      options: how batches are cut.
      like: an example to take features from; None for the first of the stream.
      on_drift: what is called where lengths drift.
      processes: those that tell one another where their streams end.
      first: of this worker's steps the first, and
      stride: from each to its next.
    """

    open_epoch: Callable[[int], grain.IterDataset]
    phases: tuple[Phase, ...]
    options: Options
    like: Example | None
    on_drift: OnDrift | None
    processes: Meeting | None
    first: int = 0
    stride: int = 1

    @property
    def plan(self) -> BucketPlan:
        """That of the first step."""
        return self.phases[0].plan

    @property
    def transform(self) -> StreamTransform:
        """What is made of each example."""
        options = self.options
        part = options.shard.parts[0]
        return StreamTransform(options.transform, options.seed, part, self.first)

    def step(self, number: int) -> int:
        """Returns which step the so many-th of this worker is."""
        return self.first + number * self.stride

    def phase_at(self, step: int) -> Phase:
        """Returns the plan in force at a step."""
        index = bisect.bisect_right(self.phases, step, key=lambda x: x.first_step)
        return self.phases[index - 1]

    def phase_end(self, step: int) -> float:
        """Returns where the plan in force at a step is so no more."""
        firsts = (x.first_step for x in self.phases if x.first_step > step)
        return min(firsts, default=math.inf)

    def traits(self, before: float = math.inf) -> dict[str, Any]:
        """Returns what batches before a step depend on, as plain Python."""
        plans = [
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self.phases
            if phase.first_step < max(before, 1)
        ]
        return {
            **self.options.traits(),
            "plans": ", ".join(plans),
            "processes_meet": self.processes is not None,
        }
