"""The phases of a stream: ranges of steps, each with its plan."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.digest import digest
from jaxbucket.base.lengths import Lengths
from jaxbucket.base.permutation import fold
from jaxbucket.packing.rows import pack as pack_rows
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.reports.epoch import row_lengths
from jaxbucket.stream.bucket_sequence import BucketSequence, bucket_shares
from jaxbucket.stream.options import Options, Policy
from jaxbucket.stream.packed_pool import PackedPool
from jaxbucket.stream.pool import PaddedPool, Pool

Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = Lengths | Mapping[int, Lengths]


class Phase(NamedTuple):
    """The plan of a range of steps."""

    first_step: int
    plan: BucketPlan
    sequence: BucketSequence | None  # None for a single process.
    rows: tuple[int, ...]  # `[K]` rows of each batch in this process.
    max_segments: int | None  # None if rows are not packed.
    # `[N]` or `[N, Q]` lengths that the plan was made for, if known.
    sample: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        shares = self.sequence.shares if self.sequence else ()
        parts = [self.plan.fingerprint, str(self.max_segments), *map(str, shares)]
        return digest("\n".join(parts).encode())

    def new_pool(self, policy: Policy) -> Pool:
        if self.max_segments is None:
            return PaddedPool(self.plan)
        return PackedPool(self.plan, self.max_segments, policy == "closest")


def make_phases(
    plans: Mapping[int, BucketPlan],
    lengths: Samples | None,
    options: Options,
    max_segments_per_row: int | None,
) -> tuple[Phase, ...]:
    """Returns the phases of plans, in the order of their first steps.

    Args:
      plans: plans by their first steps, from `checked_plans`.
      lengths: the lengths that the plans were made for, or lengths by first steps.
      options: the options of the stream.
      max_segments_per_row: the largest number of examples in a packed row; None to
        derive it from `lengths`.

    Raises:
      ValueError: if plans, lengths and options do not fit together.
    """
    steps = list(plans)
    samples = _samples_by_step(lengths, steps)
    if sorted(samples) != steps:
        raise ValueError(
            f"`lengths` has steps {sorted(samples)}, but `plan` has {steps}. Pass "
            "lengths for each plan, or the same for all plans."
        )
    phases: list[Phase] = []
    for step in steps:
        phase = _make_phase(
            step, plans[step], samples[step], options, max_segments_per_row
        )
        # All plans share it, because it sets the shape of per-example features.
        max_segments_per_row = phase.max_segments or max_segments_per_row
        phases.append(phase)
    return tuple(phases)


def _samples_by_step(
    lengths: Samples | None, steps: list[int]
) -> Mapping[int, Lengths | None]:
    """Returns the lengths for each plan, by first steps."""
    # A mapping from sequence names holds the lengths for all plans.
    if isinstance(lengths, Mapping) and not any(isinstance(x, str) for x in lengths):
        return cast(Mapping[int, Lengths], lengths)
    return dict.fromkeys(steps, cast(Lengths | None, lengths))


def checked_plans(plan: Plans) -> dict[int, BucketPlan]:
    """Returns plans by their first steps, in order, after checking them.

    Raises:
      ValueError: if there is none for step 0, or they do not hold the same examples.
    """
    plans = plan if isinstance(plan, Mapping) else {0: plan}
    for step, plan in plans.items():
        if not isinstance(step, numbers.Integral):
            raise ValueError(
                f"`plan` has the key {step!r}, but its keys are first steps. Pass a "
                "plan, or a dict `{0: plan, step: later_plan}` with integer steps."
            )
        if not isinstance(plan, BucketPlan):
            raise ValueError(
                f"`plan[{step}]` is a {type(plan).__name__}, not a `BucketPlan`. Make "
                "one with `plan_buckets`."
            )
    steps = sorted(plans)
    if not steps or steps[0] != 0:
        raise ValueError(f"`plan` has first steps {steps}. Include a plan for step 0.")
    for step in steps:
        _check_later_plan(step, plans[step], plans[0])
    return {step: plans[step] for step in steps}


def _check_later_plan(step: int, plan: BucketPlan, first: BucketPlan) -> None:
    """Raises a ValueError if a plan does not hold the examples of the first one."""
    if plan.sequences != first.sequences:
        raise ValueError(
            f"`plan[{step}]` has the sequences {list(plan.sequences)}, but the first "
            f"plan has {list(first.sequences)}. Plan with the same sequences."
        )
    names = ["max_seq_lens" if plan.sequences else "max_seq_len"]
    names += ["overlong"]
    for name in names:
        value, expected = getattr(plan, name), getattr(first, name)
        if value != expected:
            argument = name.replace("seq_lens", "seq_len")
            raise ValueError(
                f"`plan[{step}]` has `{argument}={value!r}`, but the first plan has "
                f"{expected!r}, which pending examples already follow. Plan with "
                f"`{argument}={expected!r}`."
            )
    unheld = ~fits(first.seq_lens, plan.seq_lens).any(axis=1)
    if unheld.any():
        bucket = first.buckets[int(unheld.argmax())]
        raise ValueError(
            f"`plan[{step}]` has no bucket that holds `seq_len={bucket.seq_len!r}`, as "
            "the first plan has, so it cannot hold all pending examples. Add such an "
            "example to the lengths that you plan with."
        )


def _make_phase(
    step: int,
    plan: BucketPlan,
    lengths: Lengths | None,
    options: Options,
    max_segments_per_row: int | None,
) -> Phase:
    if plan.sequences and options.pack:
        raise ValueError(
            f"`pack=True` requires examples with one length, but the plan from step "
            f"{step} has the sequences {list(plan.sequences)}. Remove `pack`, to have "
            "one example per row."
        )
    if plan.packed and not options.pack:
        raise ValueError(
            f"The plan from step {step} is for packed rows. Pass `pack=True`, or "
            "use `plan.unpacked` to have one example per row."
        )
    rows = _local_rows(plan, options)
    if lengths is None and not options.is_single_process:
        raise ValueError(
            "`lengths` is missing. Several processes share a sequence of buckets that "
            "is derived from the lengths that the plan was made for. Pass the same "
            "lengths in all processes."
        )
    sample = max_segments = sequence = None
    if lengths is not None:
        if not plan.sequences:
            lengths = row_lengths(plan, check_lengths(cast(ArrayLike, lengths)))
        sample = plan.check(lengths)
    if options.pack:
        max_segments = _max_segments(plan, sample, max_segments_per_row)
    if not options.is_single_process:
        assert sample is not None
        shares = bucket_shares(plan, sample, max_segments)
        sequence = BucketSequence(shares, fold(options.seed, step))
    return Phase(step, plan, sequence, rows, max_segments, sample)


def _local_rows(plan: BucketPlan, options: Options) -> tuple[int, ...]:
    """Returns the `[K]` rows of each batch in this process, all within `pool_size`."""
    shard, batches = options.shard, options.micro_batches_per_bucket
    rows = tuple(
        shard.part_size(bucket.batch_size) * len(shard.parts) for bucket in plan.buckets
    )
    needed = max(rows) * batches
    if options.pool_size < needed:
        of_batches = f" of {batches} batches" if batches > 1 else ""
        raise ValueError(
            f"`pool_size={options.pool_size}` is smaller than the {needed} rows"
            f"{of_batches} of bucket {plan.buckets[rows.index(max(rows))]}. Raise it "
            "to a few times this number."
        )
    return rows


def _max_segments(
    plan: BucketPlan, sample: np.ndarray | None, max_segments_per_row: int | None
) -> int:
    if max_segments_per_row is not None:
        number = check_positive("max_segments_per_row", max_segments_per_row)
        return min(number, plan.max_seq_len)
    if sample is None:
        raise ValueError(
            "`max_segments_per_row` is missing. It sets the shape of features with one "
            "number per example, `[B, max_segments_per_row]`. Pass it, or `lengths`."
        )
    return pack_rows(plan.kept_lengths(sample), plan.boundaries.tolist()).max_segments
