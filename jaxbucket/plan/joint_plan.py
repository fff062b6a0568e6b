"""Plans for examples with several sequences, and how good they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
from jaxbucket.base.lengths import lengths_matrix
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.base.sizes import Sizes, checked_size
from jaxbucket.plan.chains import nested_shapes
from jaxbucket.plan.joint.planner import JointShapes, search_shapes
from jaxbucket.plan.sequence_limits import SequenceLimits


@dataclasses.dataclass(frozen=True)
class JointPlan:
    """A plan for examples with several sequences, with a bound on its cost.

    Attributes:
      plan: the buckets.
      epoch_cost: the cost of an epoch, remainders included.
      lower_bound: the cost of an epoch of any other plan with at most as many buckets
        is not lower, if each B is the largest within the limits. With more than 65,536
        combinations of T, this is about plans whose T are lengths of examples, rounded
        up to the multiples.
      proven: whether no other such plan is cheaper.
    """

    plan: BucketPlan
    epoch_cost: float
    lower_bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """The share of the cost that the best plan may save at most; 0 if proven."""
        return 0.0 if self.proven else 1 - self.lower_bound / self.epoch_cost

    @property
    def summary(self) -> str:
        """A sentence on how good the plan is."""
        if self.proven:
            return "No other plan with the largest B within the limits is cheaper."
        return (
            "No other plan with the largest B within the limits costs over "
            f"{self.gap:.1%} less."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        names = ("epoch_cost", "lower_bound", "proven", "gap")
        return {name: getattr(self, name) for name in names}


@bar_if_slow("Planning buckets")
def plan_jointly(
    lengths: Mapping[str, ArrayLike], limits: SequenceLimits, num_buckets: int = 8
) -> JointPlan:
    """Returns a plan for examples with several sequences, planned in all of them.

    `plan_buckets` returns the same plan, without the bound on its cost. Small problems
    are solved exactly. Otherwise the buckets come from a local search, which minimizes
    the cost of an epoch, remainders included; and a bound, from a relaxation of the
    problem, says how much cheaper any other plan could be.

    Example:
      >>> lengths = {"source": [2, 8, 3, 8], "target": [8, 2, 7, 8]}
      >>> limits = SequenceLimits(sequences=("source", "target"), max_tokens=22)
      >>> best = plan_jointly(lengths, limits, num_buckets=2)
      >>> print(*best.plan.buckets, best.summary)
      [2, source 3, target 8] [1, source 8, target 8] No other plan with the largest B \
within the limits is cheaper.

    Args:
      lengths: sequence name -> `[N]` integers, one per example.
      limits: the limits of all shapes, and the cost of a step.
      num_buckets: the largest number of shapes. Each shape costs one compilation.

    Raises:
      ValueError: if the lengths are not those of the sequences of `limits`, are empty
        or not positive integers, or are longer than `max_seq_len` under "error"; or if
        the budget cannot hold an example.
    """
    shapes = best_shapes(lengths, limits, num_buckets, with_bound=True)
    return JointPlan(
        plan=limits.plan(shapes.seq_lens),
        epoch_cost=float(shapes.epoch_cost),
        lower_bound=float(shapes.lower_bound),
        proven=bool(shapes.proven),
    )


def plan_sequences(
    lengths: Mapping[str, ArrayLike], limits: SequenceLimits, num_buckets: int
) -> BucketPlan:
    """Returns the plan of `plan_jointly`, in less time, without the bound on its cost.

    Raises:
      ValueError: if `plan_jointly` raises it.
    """
    shapes = best_shapes(lengths, limits, num_buckets, with_bound=False)
    return limits.plan(shapes.seq_lens)


def best_shapes(
    lengths: Mapping[str, ArrayLike],
    limits: SequenceLimits,
    num_buckets: int,
    with_bound: bool,
) -> JointShapes:
    """Returns the T of the buckets of `plan_jointly`.

    Args:
      lengths: sequence name -> `[N]` integers, one per example.
      limits: the limits of all shapes, and the cost of a step.
      num_buckets: the largest number of shapes.
      with_bound: whether to compute the lower bound if it does not change the shapes.

    Raises:
      ValueError: if `plan_jointly` raises it.
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
        with_bound=with_bound,
    )


def plan_sequences_at(
    boundaries: Sequence[Mapping[str, int]],
    lengths: Mapping[str, ArrayLike],
    limits: SequenceLimits,
) -> BucketPlan:
    """Returns the plan with given T, and the largest B that the limits allow.

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
    plan = limits.plan(np.array(rows, np.int64))
    plan.assign(lengths)
    return plan
