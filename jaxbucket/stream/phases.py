"""The phases of a stream: ranges of steps, each with its plan."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, with_article
from jaxbucket.base.digest import digest
from jaxbucket.base.lengths import Lengths
from jaxbucket.base.permutation import fold
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.reports.epoch import row_lengths
from jaxbucket.stream.bucket_sequence import BucketSequence, bucket_shares

if TYPE_CHECKING:
    from jaxbucket.stream.run import StreamRun

Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = Lengths | Mapping[int, Lengths]


class Phase(NamedTuple):
    """The plan of a range of steps."""

    first_step: int
    plan: BucketPlan
    sequence: BucketSequence | None  # None for a single process.
    rows: tuple[int, ...]  # `[K]` rows of each batch in this process.
    # `[N]` or `[N, Q]` lengths that the plan was made for, if known.
    sample: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        shares = self.sequence.shares if self.sequence else ()
        return digest("\n".join([self.plan.fingerprint, *map(str, shares)]).encode())


def make_phases(
    plan: Plans, lengths: Samples | None, run: StreamRun
) -> tuple[Phase, ...]:
    """Returns the phases of plans, in the order of their first steps.

    Args:
      plan: a plan, or plans by their first steps.
      lengths: the lengths that the plans were made for, or lengths by first steps.
      run: the options of the stream.

    Raises:
      ValueError: if plans, lengths and options do not fit together.
    """
    plans = _by_step(plan)
    if not all(isinstance(x, BucketPlan) for x in plans.values()):
        kinds = ", ".join(with_article(x) for x in plans.values())
        raise ValueError(
            f"`plan` is {kinds}, not a `BucketPlan`. Make one with `plan_buckets`."
        )
    if 0 not in plans:
        raise ValueError(
            f"`plan` has the first steps {sorted(plans)}. Include a plan for step 0."
        )
    samples = _by_step(lengths)
    if len(samples) == 1 and 0 in samples:
        samples = dict.fromkeys(plans, samples[0])
    if samples.keys() != plans.keys():
        raise ValueError(
            f"`lengths` has the steps {sorted(samples)}, but `plan` has "
            f"{sorted(plans)}. Pass lengths for each plan, or the same for all plans."
        )
    for step in plans:
        _check_later_plan(step, plans[step], plans[0])
    return tuple(
        _make_phase(step, plans[step], samples[step], run) for step in sorted(plans)
    )


def _by_step(value: Any) -> dict[int, Any]:
    """Returns a mapping from first steps to values; a single value is for step 0."""
    is_by_step = isinstance(value, Mapping) and all(
        isinstance(key, numbers.Integral) for key in value
    )
    return {int(key): value[key] for key in value} if is_by_step else {0: value}


def _check_later_plan(step: int, plan: BucketPlan, first: BucketPlan) -> None:
    """Raises a ValueError if a plan does not hold the examples of the first one."""
    for name in ("sequences", "overlong", "seq_lens"):
        mine, others = getattr(plan, name), getattr(first, name)
        if name == "seq_lens":
            is_same = plan.sequences or plan.max_seq_len == first.max_seq_len
            is_same = is_same and fits(others, mine).any(axis=1).all()
            mine, others = mine.max(axis=0).tolist(), others.max(axis=0).tolist()
        else:
            is_same = mine == others
        if not is_same:
            raise ValueError(
                f"`plan[{step}]` has `{name}` {mine}, but the first plan has {others}, "
                "so it does not hold the same examples, some of which are pending. "
                "Plan with the same sequences, `overlong` and longest buckets."
            )


def _make_phase(
    step: int, plan: BucketPlan, lengths: Lengths | None, run: StreamRun
) -> Phase:
    if bool(plan.sequences) and run.max_segments is not None:
        raise ValueError(
            f"`max_segments_per_row={run.max_segments}` requires examples with one "
            f"length, but the plan has the sequences {list(plan.sequences)}. Omit it, "
            "to have one example per row."
        )
    if plan.packed and run.max_segments is None:
        raise ValueError(
            "`max_segments_per_row` is missing, and the plan is for packed rows. Pass "
            "the largest number of examples in a row, or `plan.unpacked` to have one."
        )
    if plan.max_ratio is not None:
        raise ValueError(
            f"`plan` has `max_ratio={plan.max_ratio}`, which streams do not apply. "
            "Leave examples out by `dataset.filter`, and plan without it."
        )
    rows = _local_rows(plan, run)
    if lengths is None and not run.has_all_rows:
        raise ValueError(
            "`lengths` is missing. Several processes share a sequence of buckets that "
            "is derived from the lengths that the plan was made for. Pass the same "
            "lengths in all processes."
        )
    sample = sequence = None
    if lengths is not None:
        if not plan.sequences:
            lengths = row_lengths(plan, check_lengths(cast(ArrayLike, lengths)))
        sample = plan.check(lengths)
    if sample is not None and not run.has_all_rows:
        shares = bucket_shares(plan, sample, run.max_segments)
        sequence = BucketSequence(shares, fold(run.examples.seed, step))
    return Phase(step, plan, sequence, rows, sample)


def _local_rows(plan: BucketPlan, run: StreamRun) -> tuple[int, ...]:
    """Returns the `[K]` rows of each batch in this process, all within `pool_size`."""
    shard, batches = run.shard, run.micro_batches_per_bucket
    rows = tuple(
        shard.part_size(bucket.batch_size) * len(shard.parts) for bucket in plan.buckets
    )
    needed = max(rows) * batches
    if run.pool_size < needed:
        of_batches = f" of {batches} batches" if batches > 1 else ""
        raise ValueError(
            f"`pool_size={run.pool_size}` is smaller than the {needed} rows"
            f"{of_batches} of bucket {plan.buckets[rows.index(max(rows))]}. Raise it "
            "to a few times this number."
        )
    return rows
