"""The inputs of a stream iterator: the stream, its plans and options."""

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
from jaxbucket.stream.overlong import LengthLimits
from jaxbucket.stream.phases import Phase
from jaxbucket.stream.reader import StreamReader

# The number of snapshots of the stream per `pool_size` examples.
_SNAPSHOTS_PER_POOL = 8


@dataclasses.dataclass(frozen=True)
class StreamRun:
    """A stream, with its plans and options."""

    dataset: Stream
    phases: tuple[Phase, ...]  # In the order of their first steps.
    options: Options
    like: Example | None
    on_drift: OnDrift | None
    processes: ProcessGroup | None  # The processes that end their streams together.
    first_step: int = 0  # The first step of this worker.
    step_stride: int = 1  # The distance between two steps of this worker.

    def sliced(self, sl: slice, sequential_slice: bool) -> StreamRun:
        """Returns the run of a worker, with its share of the stream and the steps."""
        if isinstance(self.dataset, grain.IterDataset):
            slice_stream(self.dataset, sl, sequential_slice)
        return dataclasses.replace(
            self,
            first_step=self.first_step + (sl.start or 0) * self.step_stride,
            step_stride=self.step_stride * (sl.step or 1),
        )

    def open_epoch(self, epoch: int) -> grain.IterDataset:
        """Returns this worker's stream of an epoch."""
        dataset = open_epoch(self.dataset, epoch, self.options.seed)
        if self.step_stride > 1 and not isinstance(self.dataset, grain.IterDataset):
            dataset = copy.deepcopy(dataset)
            slice_stream(dataset, slice(self.first_step, None, self.step_stride), False)
        return dataset

    def new_reader(self) -> StreamReader:
        """Returns a reader at the start of the stream."""
        options, plan = self.options, self.phases[0].plan
        has_whole_stream = options.is_single_process and self.step_stride == 1
        return StreamReader(
            open_epoch=self.open_epoch,
            num_epochs=options.num_epochs,
            limits=LengthLimits.of_plan(plan, options.sequences),
            transform=StreamTransform(
                options.transform,
                options.seed,
                options.shard.parts[0],
                self.first_step,
            ),
            snapshot_every=max(1, options.pool_size // _SNAPSHOTS_PER_POOL),
            # A worker's share may be empty, but an empty stream must not be repeated
            # forever.
            allow_empty=options.num_epochs is not None and not has_whole_stream,
        )

    @property
    def num_processes(self) -> int | None:
        """The number of processes that read parts of the stream; None if not known."""
        if self.processes is not None:
            return self.processes.count
        return 1 if self.options.is_single_process else None

    def global_step(self, local_step: int) -> int:
        """Converts a step of this worker to a global step."""
        return self.first_step + local_step * self.step_stride

    def phase_at(self, step: int) -> Phase:
        """Returns the phase of a step."""
        index = bisect.bisect_right(self.phases, step, key=lambda x: x.first_step)
        return self.phases[index - 1]

    def phase_end(self, step: int) -> float:
        """Returns the step at which the phase of `step` ends; infinity for the last."""
        first_steps = (x.first_step for x in self.phases if x.first_step > step)
        return min(first_steps, default=math.inf)

    def config(self, before: float = math.inf) -> dict[str, Any]:
        """Returns the options and plans that the batches before a step depend on.

        The values are plain Python for JSON.
        """
        return {
            **self.options.config(),
            "plans": self._plans(0, max(before, 1)),
            "processes_meet": self.processes is not None,
        }

    def later_plans(self, step: int) -> str:
        """Returns a description of the plans that no batch before a step depends on."""
        return self._plans(max(step, 1), math.inf)

    def _plans(self, start: float, end: float) -> str:
        return ", ".join(
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self.phases
            if start <= phase.first_step < end
        )
