"""Plans for examples with several lengths, such as source and target.

Choosing K shapes is a facility location problem: every example goes to the cheapest
shape that holds it. The steps are those of the description in `jaxbucket.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.assignment import cheapest
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.sizes import Sizes, checked_size, lengths_matrix
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.dominance import dominates, is_maximal, shape_order
from jaxbucket.plan.flow.remainder import epoch_cost, epoch_flow
from jaxbucket.plan.joint_points import Points
from jaxbucket.plan.joint_pricing import Pricing
from jaxbucket.plan.joint_search import Search
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.nested import nested_shapes
from jaxbucket.plan.tally import Tally

# With more combinations of T, only the rounded-up lengths of examples are possible.
_MAX_SHAPES = 1 << 16
# Rounds of choosing B for the examples of each bucket and counting these again, because
# B changes which bucket is the cheapest.
_ROUNDS = 4


def plan_sequences(
    lengths: Mapping[str, ArrayLike], limits: Limits, num_buckets: int
) -> BucketPlan:
    """Returns a plan of at most K shapes, each with a T for every sequence."""
    matrix = lengths_matrix(lengths, limits.sequences)
    planned = limits.planned_lengths(matrix)
    # Fails early, with a remedy, if one of the longest examples fits no batch.
    rounded = limits.rounded(planned)
    needed = rounded[[rounded.sum(axis=1).argmax(), *rounded.argmax(axis=0)]]
    if num_buckets == 1:
        needed = rounded.max(axis=0)[None]
    if limits.must_hold_all:
        needed = np.append(limits.max_seq_lens(planned)[None], needed, axis=0)
    limits.check_shapes(needed)
    starts = [shapes for _, shapes in nested_shapes(planned, limits, num_buckets)]
    shapes = search_shapes(planned, limits, num_buckets, starts)
    return _without_unused(fitted_plan(limits, shapes, matrix), limits, matrix)


def _without_unused(
    plan: BucketPlan, limits: Limits, lengths: np.ndarray
) -> BucketPlan:
    """Returns a plan without the buckets that have no batches, if it costs no more."""
    counts = Tally.of(plan, lengths).examples
    rows = plan.batch_sizes * limits.accumulate
    flow = epoch_flow(plan, counts, rows, plan.costs)
    is_used = (flow.batches > 0) | (limits.must_hold_all & is_maximal(plan.seq_lens))
    if is_used.all():
        return plan
    fewer = fitted_plan(limits, plan.seq_lens[is_used], lengths)
    cost = _epoch_cost(fewer, Tally.of(fewer, lengths).examples, limits.accumulate)
    more = epoch_cost(flow.batches, plan.costs * limits.accumulate)
    return fewer if cost <= more else plan


def fitted_plan(limits: Limits, seq_lens: np.ndarray, lengths: Any) -> BucketPlan:
    """Returns the plan with given T, `[K, Q]`, and B for the examples in each."""
    return with_batch_sizes(
        limits, seq_lens, lambda plan: Tally.of(plan, lengths).examples
    )


def with_batch_sizes(
    limits: Limits, seq_lens: np.ndarray, counts_fn: Callable[[BucketPlan], np.ndarray]
) -> BucketPlan:
    """Returns the plan with given T, `[K, Q]`, and B for the rows of each bucket.

    Rows may change their bucket with the cost of a row, and so with B: `counts_fn`
    returns how many of them a plan assigns to each bucket, `[K]`.
    """
    plans, costs = [limits.plan(seq_lens)], []
    for _ in range(_ROUNDS):
        counts = counts_fn(plans[-1])
        costs.append(_epoch_cost(plans[-1], counts, limits.accumulate))
        plan = limits.plan(seq_lens, counts)
        if plan == plans[-1]:
            break
        plans.append(plan)
    # A plan of the last round has no cost yet, and is left out.
    return min(zip(costs, plans, strict=False), key=lambda pair: pair[0])[1]


def _epoch_cost(plan: BucketPlan, counts: np.ndarray, accumulate: int) -> float:
    rows = plan.batch_sizes * accumulate
    flow = epoch_flow(plan, counts, rows, plan.costs)
    return epoch_cost(flow.batches, plan.costs * accumulate)


def plan_sequences_at(
    boundaries: Sequence[Any], lengths: Mapping[str, ArrayLike], limits: Limits
) -> BucketPlan:
    """Returns the plan with given T, one mapping by sequence name for each bucket."""
    sizes: list[Any] = [checked_size("boundaries", x) for x in boundaries]
    names = {tuple(x) if isinstance(x, Sizes) else () for x in sizes}
    if names != {limits.sequences}:
        raise ValueError(
            f"`boundaries={boundaries}`: pass at least one mapping, each with a T for "
            f"{list(limits.sequences)}."
        )
    rows = np.array([list(x.values()) for x in sizes], np.int64)
    limits.check_boundaries(rows)
    return fitted_plan(limits, rows, lengths)


def search_shapes(
    lengths: np.ndarray,
    limits: Limits,
    num_buckets: int,
    starts: Iterable[np.ndarray] = (),
) -> np.ndarray:
    """Returns at most K shapes for which an epoch is as cheap as possible.

    Every example is in the cheapest shape that holds it. B of each shape and remainders
    are those of `fitted_between`.

    Example: two shapes for four pairs of lengths, by tokens.
      >>> lengths = np.array([[2, 8], [8, 2], [3, 7], [8, 8]])
      >>> search_shapes(lengths, Limits(sequences=("a", "b"), max_tokens=22), 2)
      array([[3, 8],
             [8, 8]])

    Args:
      lengths: `[N, Q]` positive integers, the lengths of the sequences of each example,
        as `limits.planned_lengths` returns them.
      limits: the limits of all shapes, and the cost of a step.
      num_buckets: K, the largest number of shapes.
      starts: the T of shapes that hold all examples, `[K, Q]` each, from which the
        search also starts. The last one is the longest.

    Returns:
      `[K, Q]` int64, the T of each shape, in the order of a plan.
    """
    last = limits.max_seq_lens(lengths)
    points = Points.of(lengths, limits.multiples, last, _MAX_SHAPES)
    pricing = Pricing.of(limits, points)
    search = Search(points, pricing, num_buckets, limits.must_hold_all)
    choices = [*search.choices(list(starts)), *search.best_sets()]
    plans = [_evaluated(points, limits, seq_lens) for seq_lens in choices]
    if not plans:
        limits.check_shapes(points.seq_lens(points.frontier()))
        raise ValueError(
            f"`num_buckets={num_buckets}`: no choice of so few shapes was found that "
            "holds all examples, because the budget excludes the longest shapes. Raise "
            "`num_buckets` or the budget."
        )
    return min(plans, key=lambda plan: plan[0])[1]


def _evaluated(
    points: Points, limits: Limits, seq_lens: np.ndarray
) -> tuple[float, np.ndarray]:
    """Returns the cost of an epoch with shapes, `[K, Q]` T, and those that are used."""
    seq_lens = seq_lens[shape_order(seq_lens)]
    lengths = points.seq_lens(points.indices)
    # By the cost of a row, as `BucketPlan.assign` does, but here in the largest batch.
    assigned = cheapest(lengths, seq_lens, Pricing(limits)(seq_lens).rates)
    counts = np.bincount(assigned, points.counts, len(seq_lens)).astype(np.int64)
    batch_sizes = limits.batch_sizes(seq_lens)
    sizes = limits.sizes(seq_lens, batch_sizes, np.full_like(batch_sizes, counts.sum()))
    _, cost, flow = fitted_between(sizes, counts, dominates(seq_lens))
    used = flow.counts + flow.carried > 0
    if limits.must_hold_all:
        used[-1] = True
    return cost, seq_lens[used]
