"""The inputs of a stream's iterators: the examples, the plans and the options."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.batch import RowShard
from jaxbucket.base.checks import check_accumulate, check_choice, check_positive
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.stream.examples import ExampleStream
from jaxbucket.stream.overlong import LengthLimits
from jaxbucket.stream.packed_pool import PackedPool
from jaxbucket.stream.phases import Phase, Plans, Samples, make_phases
from jaxbucket.stream.pool import PaddedPool, Pool
from jaxbucket.stream.reader import StreamReader

Policy: TypeAlias = Literal["closest", "first"]

# The number of snapshots of the stream per `pool_size` examples.
_SNAPSHOTS_PER_POOL = 8
# The number of pools of examples that may arrive while an example is pending.
_POOLS_TO_WAIT = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StreamRun:
    """The inputs of a stream's iterators; `stream_batches` documents each field."""

    examples: ExampleStream
    plan: Plans
    lengths: Samples | None
    pool_size: int
    policy: Policy
    shard: RowShard
    processes: ProcessGroup | None
    accumulate: int
    group: Group
    num_steps: int | None
    max_segments: int | None

    def __post_init__(self):
        check_positive("pool_size", self.pool_size)
        check_choice("policy", self.policy, get_args(Policy))
        check_accumulate(self.accumulate)
        check_choice("group", self.group, GROUPS)
        for name, value in {
            "num_steps": self.num_steps,
            "max_segments_per_row": self.max_segments,
        }.items():
            if value is not None:
                check_positive(name, value)
        # Checks the plans and the sequences.
        self.examples.listed_sequences(self.phases[0].plan.sequences)
        self._check_processes()

    def _check_processes(self) -> None:
        if self.processes is not None and not hasattr(self.processes, "gather"):
            raise ValueError(
                f"`processes={self.processes!r}` has no `gather` method. Pass the "
                "`Processes` of the run."
            )
        is_alone = self.has_all_rows or self.processes is not None
        if not is_alone and self.num_steps is None:
            raise ValueError(
                "`processes` is missing. This process has only a part of the rows and "
                "cannot see when the streams of the others end. Pass the `Processes` "
                "of the run, or `num_steps`."
            )

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in the order of their first steps."""
        return make_phases(self.plan, self.lengths, self)

    @property
    def has_all_rows(self) -> bool:
        """Whether this process has all rows of every batch."""
        return len(self.shard.parts) == self.shard.num_parts

    @property
    def meets(self) -> bool:
        """Whether processes exchange the status of their streams."""
        if self.processes is None:
            return False
        return self.processes.count > 1 or not self.has_all_rows

    @property
    def num_processes(self) -> int | None:
        """The number of processes that read parts of the stream; None if not known."""
        if self.processes is not None:
            return self.processes.count
        return 1 if self.has_all_rows else None

    @property
    def max_wait(self) -> int:
        """The number of later examples after which a pending example is overdue."""
        return _POOLS_TO_WAIT * self.pool_size

    @property
    def buckets_per_step(self) -> int:
        """The number of buckets that are chosen in a step."""
        return self.accumulate if self.group == "mixed" else 1

    @property
    def micro_batches_per_bucket(self) -> int:
        """The number of micro-batches that are filled for each chosen bucket."""
        return self.accumulate // self.buckets_per_step

    def new_pool(self, phase: Phase) -> Pool:
        """Returns an empty pool for the plan of a phase."""
        if self.max_segments is None:
            return PaddedPool(phase.plan)
        return PackedPool(phase.plan, self.max_segments, self.policy == "closest")

    def new_reader(self) -> StreamReader:
        """Returns a reader at the start of the stream."""
        plan, examples = self.phases[0].plan, self.examples
        sequences = examples.listed_sequences(plan.sequences)
        return StreamReader(
            examples=examples,
            limits=LengthLimits.of_plan(plan, sequences),
            part=self.shard.parts[0],
            snapshot_every=max(1, self.pool_size // _SNAPSHOTS_PER_POOL),
            # A process's share may be empty, but an empty stream must not be repeated
            # forever.
            allow_empty=examples.num_epochs is not None and not self.has_all_rows,
        )

    def phase_at(self, step: int) -> Phase:
        """Returns the phase of a step."""
        index = bisect.bisect_right(self.phases, step, key=lambda x: x.first_step)
        return self.phases[index - 1]

    def phase_end(self, step: int) -> float:
        """Returns the step at which the phase of `step` ends; infinity for the last."""
        first_steps = (x.first_step for x in self.phases if x.first_step > step)
        return min(first_steps, default=math.inf)

    def config(self, before: float = math.inf) -> dict[str, Any]:
        """Returns what the batches before a step depend on, equal in all processes.

        The values are plain Python for JSON.
        """
        return {
            **self.examples.config(self.phases[0].plan.sequences),
            "pool_size": self.pool_size,
            "policy": self.policy,
            "parts": self.shard.num_parts,
            "accumulate": self.accumulate,
            "group": self.group,
            "max_segments_per_row": self.max_segments,
            "processes_meet": self.meets,
            "plans": self.plans(0, max(before, 1)),
        }

    def plans(self, start: float, end: float) -> str:
        """Returns a description of the plans that begin within a range of steps."""
        return ", ".join(
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self.phases
            if start <= phase.first_step < end
        )
