"""The plan of every step of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_integer, check_lengths, check_positive
from jaxbucket.base.permutation import fold
from jaxbucket.base.types import BucketPlan, digest
from jaxbucket.packing.rows import pack as pack_rows
from jaxbucket.plan.reports.epoch import row_lengths
from jaxbucket.stream.bucket_sequence import BucketSequence, bucket_shares
from jaxbucket.stream.options import Options
from jaxbucket.stream.packed_pool import PackedPool
from jaxbucket.stream.pool import PaddedPool, Pool

Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = ArrayLike | Mapping[int, ArrayLike]


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
