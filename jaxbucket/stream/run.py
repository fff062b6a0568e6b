"""All that an iterator of a stream is made from."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
from typing import Any

import grain

from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.example import Example
from jaxbucket.data.transform import StreamTransform
from jaxbucket.stream.drift import OnDrift
from jaxbucket.stream.epochs import Stream, open_epoch, slice_stream
from jaxbucket.stream.options import Options
from jaxbucket.stream.phases import Phase
from jaxbucket.stream.reader import StreamReader

# Snapshots of the stream, for as many examples as the pool holds.
_SNAPSHOTS_PER_POOL = 8


@dataclasses.dataclass(frozen=True)
class StreamRun:
    """A stream, and how it is batched."""

    dataset: Stream
    phases: tuple[Phase, ...]  # In the order of their first steps.
    options: Options
    like: Example | None
    on_drift: OnDrift | None
    processes: ProcessGroup | None  # Those that end their streams together.
    first: int = 0  # The first step of this worker.
    stride: int = 1  # From each of its steps to the next.

    def sliced(self, sl: slice, sequential_slice: bool) -> StreamRun:
        """Returns the run of a worker, and leaves it its share of the stream."""
        if isinstance(self.dataset, grain.IterDataset):
            slice_stream(self.dataset, sl, sequential_slice)
        return dataclasses.replace(
            self,
            first=self.first + (sl.start or 0) * self.stride,
            stride=self.stride * (sl.step or 1),
        )

    def open_epoch(self, epoch: int) -> grain.IterDataset:
        """Returns this worker's stream of an epoch."""
        dataset = open_epoch(self.dataset, epoch, self.options.seed)
        if self.stride > 1 and not isinstance(self.dataset, grain.IterDataset):
            dataset = copy.deepcopy(dataset)
            slice_stream(dataset, slice(self.first, None, self.stride), False)
        return dataset

    def new_reader(self) -> StreamReader:
        """Returns a reader at the beginning of the stream."""
        options, plan = self.options, self.phases[0].plan
        has_whole_stream = options.is_single_process and self.stride == 1
        return StreamReader(
            open_epoch=self.open_epoch,
            num_epochs=options.num_epochs,
            max_seq_len=plan.max_seq_len,
            overlong=plan.overlong,
            sequences=options.sequences,
            transform=StreamTransform(
                options.transform, options.seed, options.shard.parts[0], self.first
            ),
            snapshot_every=max(1, options.pool_size // _SNAPSHOTS_PER_POOL),
            # A share of a stream may be empty, but must not be read for ever.
            allow_empty=options.num_epochs is not None and not has_whole_stream,
        )

    def global_step(self, local_step: int) -> int:
        """Returns the step of the run that is a worker's `local_step`."""
        return self.first + local_step * self.stride

    def phase_at(self, step: int) -> Phase:
        """Returns the plan in force at a step."""
        index = bisect.bisect_right(self.phases, step, key=lambda x: x.first_step)
        return self.phases[index - 1]

    def phase_end(self, step: int) -> float:
        """Returns the step at which the plan in force at `step` is replaced."""
        first_steps = (x.first_step for x in self.phases if x.first_step > step)
        return min(first_steps, default=math.inf)

    def config(self, before: float = math.inf) -> dict[str, Any]:
        """Returns what batches before a step depend on, as plain Python."""
        plans = [
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self.phases
            if phase.first_step < max(before, 1)
        ]
        return {
            **self.options.config(),
            "plans": ", ".join(plans),
            "processes_meet": self.processes is not None,
        }
