"""Plans for examples with several sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
from jaxbucket.base.lengths import lengths_matrix
from jaxbucket.base.sizes import Sizes, checked_size
from jaxbucket.plan.chains import nested_shapes
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.dominance import dominates, is_maximal
from jaxbucket.plan.flow.epoch import epoch_flow
from jaxbucket.plan.flow.remainder import RowFlow, epoch_cost
from jaxbucket.plan.histogram import example_counts
from jaxbucket.plan.joint.planner import search_shapes
from jaxbucket.plan.sequence_limits import SequenceLimits

# How often B are chosen for the examples of each bucket, and these for the B.
_ROUNDS = 4


def plan_sequences(
    lengths: Mapping[str, ArrayLike], limits: SequenceLimits, num_buckets: int
) -> BucketPlan:
    """Returns a plan for examples with several sequences, planned in all of them.

    The buckets come from a local search, which minimizes the cost of an epoch,
    remainders included.

    Args:
      lengths: sequence name -> `[N]` integers, one per example.
      limits: the limits of all shapes, and the cost of a step.
      num_buckets: the largest number of shapes. Each shape costs one compilation.

    Raises:
      ValueError: if the lengths are not those of the sequences of `limits`, are empty
        or not positive integers, or are longer than `max_seq_len` under "error"; or if
        the budget cannot hold an example.
    """
    plan = fitted_plan(limits, best_shapes(lengths, limits, num_buckets), lengths)
    counts = example_counts(plan, lengths)
    batches = _flow(plan, counts, limits.accumulate).batches
    is_used = (batches > 0) | (limits.must_hold_all & is_maximal(plan.seq_lens))
    if is_used.all():
        return plan
    fewer = fitted_plan(limits, plan.seq_lens[is_used], lengths)
    cost = _epoch_cost(fewer, example_counts(fewer, lengths), limits.accumulate)
    more = _epoch_cost(plan, counts, limits.accumulate)
    return fewer if cost <= more else plan


def fitted_plan(
    limits: SequenceLimits,
    seq_lens: np.ndarray,
    lengths: Mapping[str, ArrayLike] | np.ndarray,
) -> BucketPlan:
    """Returns the plan with given T, with B for the examples of each bucket.

    Args:
      limits: the limits of all shapes, and the cost of a step.
      seq_lens: `[K, Q]` integers, the T of each sequence.
      lengths: sequence name -> `[N]` integers, one per example; or `[N, Q]`.

    Raises:
      ValueError: if a bucket cannot hold a single row, or no bucket holds an example.
    """
    matrix = lengths_matrix(lengths, limits.sequences)
    return with_batch_sizes(
        limits, limits.plan(seq_lens), lambda plan: example_counts(plan, matrix)
    )


def with_batch_sizes(
    limits: SequenceLimits,
    largest: BucketPlan,
    counts_fn: Callable[[BucketPlan], np.ndarray],
) -> BucketPlan:
    """Returns a plan with B for the rows of each bucket.

    Examples may change their bucket with the cost of a row, and so with B.

    Args:
      limits: the limits of all shapes, and the cost of a step.
      largest: the plan with the largest B.
      counts_fn: plan -> `[K]` integers, the rows that each bucket is assigned.
    """
    plans, above = [largest], dominates(largest.seq_lens)
    costs = []
    for _ in range(_ROUNDS):
        counts = counts_fn(plans[-1])
        costs.append(_epoch_cost(plans[-1], counts, limits.accumulate))
        sizes = limits.sizes(largest.seq_lens, int(counts.sum()))
        rows, _ = fitted_between(sizes, counts, above)
        plan = limits.plan(largest.seq_lens, rows // limits.accumulate)
        if plan == plans[-1]:
            break
        plans.append(plan)
    return min(zip(costs, plans, strict=False), key=lambda pair: pair[0])[1]


def _flow(plan: BucketPlan, counts: np.ndarray, accumulate: int) -> RowFlow:
    return epoch_flow(plan, counts, "cheapest", accumulate)


def _epoch_cost(plan: BucketPlan, counts: np.ndarray, accumulate: int) -> float:
    batches = _flow(plan, counts, accumulate).batches
    return epoch_cost(batches, plan.costs * accumulate)


def best_shapes(
    lengths: Mapping[str, ArrayLike], limits: SequenceLimits, num_buckets: int
) -> np.ndarray:
    """Returns the T of the buckets of `plan_sequences`, `[K, Q]`.

    Raises:
      ValueError: if `plan_sequences` raises it.
    """
    if not isinstance(limits, SequenceLimits):
        raise ValueError(
            f"`limits` is a {type(limits).__name__}. Pass `SequenceLimits`, because "
            "examples have several sequences."
        )
    num_buckets = check_positive("num_buckets", num_buckets)
    matrix = lengths_matrix(lengths, limits.sequences)
    planned = limits.planned_lengths(matrix)
    # The longest examples need the largest shapes.
    rounded = limits.rounded(planned)
    needed = rounded[[rounded.sum(axis=1).argmax(), *rounded.argmax(axis=0)]]
    if num_buckets == 1:
        needed = rounded.max(axis=0)[None]
    if limits.must_hold_all:
        needed = np.append(limits.max_seq_lens(matrix)[None], needed, axis=0)
    limits.check_shapes(needed)
    return search_shapes(
        planned,
        num_buckets,
        limits.batch_sizes,
        limits.costs,
        multiples=limits.multiples,
        max_seq_lens=limits.max_seq_lens(matrix),
        must_hold_all=limits.must_hold_all,
        starts=(shapes for _, shapes in nested_shapes(planned, limits, num_buckets)),
        accumulate=limits.accumulate,
        batch_size_multiple=limits.batch_size_multiple,
        min_batch_size=limits.min_batch_size,
        sample=limits.sample,
    ).seq_lens


def plan_sequences_at(
    boundaries: Sequence[Mapping[str, int]],
    lengths: Mapping[str, ArrayLike],
    limits: SequenceLimits,
) -> BucketPlan:
    """Returns the plan with given T, and B for the examples of each bucket.

    Args:
      boundaries: the T of each bucket, by sequence name.
      lengths: sequence name -> `[N]` integers, one per example.
      limits: the limits of all shapes, and the cost of a step.

    Raises:
      ValueError: if there are no boundaries, one is not a mapping with a T for each
        sequence, or no bucket holds an example.
    """
    rows = []
    for boundary in boundaries:
        sizes = checked_size("boundaries", boundary)
        if not isinstance(sizes, Sizes) or tuple(sizes) != limits.sequences:
            raise ValueError(
                f"`boundaries` contains {boundary!r}. Pass a mapping with a T for each "
                f"of {list(limits.sequences)}."
            )
        rows.append(list(sizes.values()))
    if not rows:
        raise ValueError("`boundaries` is empty. Pass the T of at least one bucket.")
    return fitted_plan(limits, np.array(rows, np.int64), lengths)
