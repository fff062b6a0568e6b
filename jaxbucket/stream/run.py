"""The inputs of a stream's iterators: the examples, the plans and the options.

A *phase* is a range of steps with one plan.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import by_step, check_choice, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.permutation import fold
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.position import DataPosition
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.base.row_shard import RowShard
from jaxbucket.base.sizes import Lengths, any_lengths
from jaxbucket.plan.chunks import row_lengths
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.stream.bucket_sequence import BucketSequence, bucket_shares
from jaxbucket.stream.examples import ExampleStream
from jaxbucket.stream.overlong import LengthLimits
from jaxbucket.stream.pool import PackedPool, PaddedPool, Pool
from jaxbucket.stream.reader import StreamReader

Policy: TypeAlias = Literal["closest", "first"]
Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = Lengths | Mapping[int, Lengths]


class Phase(NamedTuple):
    """The plan of a range of steps."""

    first_step: int
    plan: BucketPlan
    sequence: BucketSequence | None  # None for a single process.
    rows: tuple[int, ...]  # `[K]` rows of each batch in this process.
    # `[N]` or `[N, Q]` lengths that the plan was made for, if known; and those of
    # their chunks, if they are split.
    known: np.ndarray | None
    sample: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        shares = self.sequence.shares if self.sequence else ()
        return digest("\n".join([self.plan.fingerprint, *map(str, shares)]).encode())


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
        check_choice("policy", self.policy, get_args(Policy))
        check_choice("group", self.group, GROUPS)
        for name in ("pool_size", "accumulate", "num_steps", "max_segments"):
            argument = name.replace("segments", "segments_per_row")
            value = getattr(self, name)
            if value is not None:
                # Python's integers, for JSON.
                object.__setattr__(self, name, check_positive(argument, value))
        # Checks the plans and the sequences.
        self.examples.config(self.phases[0].plan.sequences)
        if self.num_processes is None and self.num_steps is None:
            raise ValueError(
                "`processes` is missing, so this process with a part of the rows "
                "cannot see when other streams end. Pass it, or `num_steps`."
            )

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in the order of their first steps."""
        plans, samples = by_step("plan", self.plan), by_step("lengths", self.lengths)
        if not all(isinstance(x, BucketPlan) for x in plans.values()):
            kinds = {step: type(value).__name__ for step, value in plans.items()}
            raise ValueError(
                f"`plan` has {kinds} by first steps. Pass a `BucketPlan`, or a dict "
                "`{first step: plan}` that includes step 0."
            )
        if len(samples) == 1:
            samples = dict.fromkeys(plans, samples[0])
        if samples.keys() != plans.keys():
            raise ValueError(
                f"`lengths` has the steps {sorted(samples)}, but `plan` "
                f"{sorted(plans)}."
            )
        for step, plan in plans.items():
            _check_later_plan(step, plan, plans[0])
        return tuple(
            _make_phase(step, plan, samples[step], self) for step, plan in plans.items()
        )

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
        return StreamReader(
            examples=examples,
            limits=LengthLimits(plan.sequences, examples.sequences, plan),
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

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of everything that batches depend on, except the stream."""
        return digest(json.dumps(self.config(), sort_keys=True).encode())

    def position(self, step: int, **options: Any) -> DataPosition:
        """Returns the position before a step.

        `options` are what else its batches depend on in this process.
        """
        # The plan of the next step may change until this step is done.
        phase = self.phase_at(max(step - 1, 0))
        plan = {**json.loads(phase.plan.to_json()), "fingerprint": phase.fingerprint}
        data = {"lengths": "unknown", "fingerprint": digest(b"")}
        if phase.sample is not None:
            data = {
                "lengths": len(phase.sample),
                "tokens": int(phase.sample.sum(dtype=np.int64)),
                "fingerprint": digest(np.ascontiguousarray(phase.sample, "<i8").data),
            }
        schedule = {
            **self.config(before=step),
            **options,
            "later": self.plans(max(step, 1), math.inf),
            "processes": self.num_processes,
            "fingerprint": self.fingerprint,
        }
        plan = {name: plan[name] for name in plan if name not in ("format", "version")}
        return DataPosition(step, plan, data, schedule)

    def plans(self, start: float, end: float) -> str:
        """Returns a description of the plans that begin within a range of steps."""
        return ", ".join(
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self.phases
            if start <= phase.first_step < end
        )


def _check_later_plan(step: int, plan: BucketPlan, first: BucketPlan) -> None:
    """Raises a ValueError if a plan does not hold the examples of the first one."""
    before, after = first.seq_lens, plan.seq_lens
    if not (
        (plan.sequences, plan.overlong) == (first.sequences, first.overlong)
        and np.array_equal(before.max(axis=0), after.max(axis=0))
        and fits(before, after).any(axis=1).all()
    ):
        raise ValueError(
            f"`plan[{step}]` does not hold the examples of the first plan. Plan with "
            "the same sequences, `overlong` and `max_seq_len`."
        )


def _make_phase(
    step: int, plan: BucketPlan, lengths: Lengths | None, run: StreamRun
) -> Phase:
    is_packed = run.max_segments is not None
    if is_packed and plan.sequences or plan.packed and not is_packed:
        raise ValueError(
            f"`max_segments_per_row={run.max_segments}` does not fit {plan}. Pass it "
            "for packed rows, which have one length; or pass `plan.unpacked`."
        )
    rows = _local_rows(plan, run)
    if lengths is None and not run.has_all_rows:
        raise ValueError(
            "`lengths` is missing, from which processes derive the sequence of "
            "buckets. Pass those of the plan, the same in all of them."
        )
    known = sample = sequence = None
    if lengths is not None:
        known = any_lengths(lengths, plan.sequences)
        sample = plan.check(row_lengths(plan, known))
    if sample is not None and not run.has_all_rows:
        shares = bucket_shares(plan, sample, run.max_segments)
        sequence = BucketSequence(shares, fold(run.examples.seed, step))
    return Phase(step, plan, sequence, rows, known, sample)


def _local_rows(plan: BucketPlan, run: StreamRun) -> tuple[int, ...]:
    """Returns the `[K]` rows of each batch in this process, all within `pool_size`."""
    batches, shard, rows = run.micro_batches_per_bucket, run.shard, []
    for bucket in plan.buckets:
        of_bucket = shard.of(bucket)
        if len(of_bucket.parts) * shard.cut(bucket) > len(shard.parts):
            raise ValueError(
                f"`shard` divides the rows of {bucket} over processes, and each has a "
                "stream of its own. Lower `data_mesh(max_row_shards=)` to its devices."
            )
        rows.append(len(of_bucket.rows(bucket.batch_size)))
    needed = max(rows) * batches
    if run.pool_size < needed:
        of_batches = f" of {batches} batches" if batches > 1 else ""
        raise ValueError(
            f"`pool_size={run.pool_size}` is smaller than the {needed} rows"
            f"{of_batches} of a bucket. Raise it to a few times this number."
        )
    return tuple(rows)
