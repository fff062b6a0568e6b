"""How a stream is batched: options that are checked, and the plan of every step."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import grain
import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import RowShard
from jaxbucket.base.buckets import GROUPS, BucketPlan, Group
from jaxbucket.base.checks import (
    check_choice,
    check_integer,
    check_lengths,
    check_positive,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue
from jaxbucket.base.peers import ProcessGroup
from jaxbucket.base.permutation import fold
from jaxbucket.data.example import Example
from jaxbucket.data.transform import StreamTransform, Transform, transform_name
from jaxbucket.packing.rows import pack as pack_rows
from jaxbucket.plan.reports.epoch import row_lengths
from jaxbucket.stream.bucket_sequence import BucketSequence, bucket_shares
from jaxbucket.stream.drift import OnDrift
from jaxbucket.stream.packed_pool import PackedPool
from jaxbucket.stream.pool import PaddedPool, Pool

Policy: TypeAlias = Literal["closest", "first"]
Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = ArrayLike | Mapping[int, ArrayLike]

POLICIES: tuple[str, ...] = get_args(Policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How batches are cut; `stream_batches` says what each of them is."""

    pool_size: int
    policy: Policy
    shard: RowShard
    accumulate: int
    group: Group
    num_steps: int | None
    num_epochs: int | None
    packs: bool
    max_wait: int
    sequences: tuple[str, ...] | None
    pad_value: PadValue
    seed: int
    transform: Transform | None = None

    def __post_init__(self):
        check_choice("policy", self.policy, POLICIES)
        check_choice("group", self.group, GROUPS)

    @property
    def alone(self) -> bool:
        """Whether this process has all rows."""
        return len(self.shard.parts) == self.shard.num_parts

    @property
    def picks(self) -> int:
        """Buckets of a step."""
        return self.accumulate if self.group == "mixed" else 1

    @property
    def together(self) -> int:
        """Micro-batches of one bucket, that are filled together."""
        return self.accumulate // self.picks

    @property
    def most_rows(self) -> int:
        """B that a batch may have, for all of it is in the pools at once."""
        own = self.pool_size // self.together
        return own * self.shard.num_parts // len(self.shard.parts)

    def traits(self) -> dict[str, Any]:
        """What batches depend on, as plain Python, the same in all processes."""
        return {
            "pool_size": self.pool_size,
            "policy": self.policy,
            "parts": self.shard.num_parts,
            "accumulate": self.accumulate,
            "group": self.group,
            "pack": self.packs,
            "max_wait": self.max_wait,
            "sequences": None if self.sequences is None else list(self.sequences),
            "pad_value": self.pad_value,
            "seed": self.seed,
            **self._transform_trait(),
        }

    def _transform_trait(self) -> dict[str, str]:
        # Runs from before there were any have states and fingerprints without.
        if self.transform is None:
            return {}
        return {"transform": transform_name(self.transform)}


class Phase(NamedTuple):
    """The plan of some steps.

    Attributes:
      first_step: from which on it is in force.
      plan: the shapes.
      sequence: of buckets, where several processes have it.
      rows: `[K]`, of a batch, in this process.
      max_segments: the most examples of a packed row; None where rows are padded.
      sample: `[N]` lengths that the plan was made for, where they are known.
    """

    first_step: int
    plan: BucketPlan
    sequence: BucketSequence | None
    rows: tuple[int, ...]
    max_segments: int | None
    sample: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        shares = self.sequence.shares if self.sequence else ()
        named = [self.plan.fingerprint, str(self.max_segments), *map(str, shares)]
        return digest("\n".join(named).encode())

    def new_pool(self, policy: Policy) -> Pool:
        if self.max_segments is None:
            return PaddedPool(self.plan)
        return PackedPool(self.plan, self.max_segments, policy == "closest")


def phases_of(
    plan: Plans,
    lengths: Samples | None,
    options: Options,
    max_segments_per_row: int | None,
) -> tuple[Phase, ...]:
    """Returns the plans by the step that each takes over at; as `stream_batches`."""
    plans = plan if isinstance(plan, Mapping) else {0: plan}
    for step, one in plans.items():
        check_integer("plan", step)
        if not isinstance(one, BucketPlan):
            raise ValueError(
                f"`plan[{step}]` is a {type(one).__name__}, not a `BucketPlan`: "
                "`plan_buckets` makes one."
            )
    steps = sorted(plans)
    if not steps or steps[0] != 0:
        raise ValueError(
            f"`plan` has first steps {steps}: the first plan is that of step 0."
        )
    first = plans[0]
    for step in steps:
        for name in ("max_seq_len", "overlong"):
            now, before = getattr(plans[step], name), getattr(first, name)
            if now != before:
                raise ValueError(
                    f"`plan[{step}]` has `{name}={now!r}`, the first {before!r}: what "
                    "waits in the pool is cut by it. Plan with the same."
                )
    if isinstance(lengths, Mapping) and sorted(lengths) != steps:
        raise ValueError(
            f"`lengths` are of steps {sorted(lengths)}, `plan` of {steps}. Give those "
            "of each plan, or some for all."
        )
    phases: list[Phase] = []
    for step in steps:
        sample = lengths[step] if isinstance(lengths, Mapping) else lengths
        phase = _phase(step, plans[step], sample, options, max_segments_per_row)
        # Features of one number for each example have one shape in all plans.
        max_segments_per_row = phase.max_segments or max_segments_per_row
        phases.append(phase)
    return tuple(phases)


def _phase(
    step: int,
    plan: BucketPlan,
    lengths: ArrayLike | None,
    options: Options,
    max_segments_per_row: int | None,
) -> Phase:
    shard = options.shard
    rows = tuple(
        shard.part_size(bucket.batch_size) * len(shard.parts) for bucket in plan.buckets
    )
    most = max(rows) * options.together
    if options.pool_size < most:
        of = f" of {options.together} batches" if options.together > 1 else ""
        raise ValueError(
            f"`pool_size={options.pool_size}` is smaller than the {most} rows{of} of "
            f"bucket {plan.buckets[rows.index(max(rows))]}. Keep a few times as many."
        )
    if lengths is None and not options.alone:
        raise ValueError(
            "`lengths` are missing: several processes have one sequence of buckets, "
            "which comes from the lengths that the plan was made for. Give the same "
            "in all of them."
        )
    sample = None
    if lengths is not None:
        sample = plan.check(row_lengths(plan, check_lengths(lengths)))
    max_segments = None
    if options.packs:
        max_segments = _max_segments(plan, sample, max_segments_per_row)
    sequence = None
    if not options.alone:
        assert sample is not None
        shares = bucket_shares(plan, sample, max_segments, options.packs)
        sequence = BucketSequence(shares, fold(options.seed, step))
    return Phase(step, plan, sequence, rows, max_segments, sample)


def _max_segments(
    plan: BucketPlan, sample: np.ndarray | None, given: int | None
) -> int:
    if given is not None:
        return min(check_positive("max_segments_per_row", given), plan.max_seq_len)
    if sample is None:
        raise ValueError(
            "`max_segments_per_row` is missing: a feature of one number for each "
            "example is `[B, max_segments_per_row]`. Give it, or `lengths`."
        )
    return pack_rows(plan.kept(sample), plan.boundaries.tolist()).max_segments


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
    processes: ProcessGroup | None
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
