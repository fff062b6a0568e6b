"""The shapes that minimize the cost of an epoch, for examples with several lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from jaxbucket.base.assignment import cheapest
from jaxbucket.base.checks import MAX_LENGTH, check_accumulate, check_positive
from jaxbucket.plan.flow.batch_sizes import fitted_between
from jaxbucket.plan.flow.between import flow_remainders_between
from jaxbucket.plan.flow.dominance import dominates, shape_order
from jaxbucket.plan.joint.all_sets import best_sets
from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.pricing import BatchSizesFn, CostsFn, Pricing
from jaxbucket.plan.joint.search import Search

# With more combinations of T, only the rounded-up lengths of examples are possible.
_MAX_SHAPES = 1 << 16


@dataclasses.dataclass(frozen=True)
class JointShapes:
    """Shapes for examples with several lengths.

    Attributes:
      seq_lens: `[K, Q]` int64, the T of each shape, in the order of a plan.
      epoch_cost: the cost of an epoch, remainders included.
      steady_cost: the cost of an epoch if every batch were full.
    """

    seq_lens: np.ndarray
    epoch_cost: float
    steady_cost: float


def search_shapes(
    lengths: np.ndarray,
    num_buckets: int,
    batch_sizes_fn: BatchSizesFn,
    costs_fn: CostsFn,
    *,
    multiples: np.ndarray,
    max_seq_lens: np.ndarray | None = None,
    must_hold_all: bool = False,
    accumulate: int = 1,
    batch_size_multiple: int = 1,
    min_batch_size: int = 1,
    sample: bool = False,
    starts: Iterable[np.ndarray] = (),
) -> JointShapes:
    """Returns at most K shapes for which an epoch is as cheap as possible.

    Every example is in the cheapest shape that holds it. B of each shape and remainders
    are those of `fitted_between`. This is a local search, and if there are few sets of
    shapes, it also compares all of them.

    Example: two shapes for four pairs of lengths, by tokens.
      >>> plan = search_shapes(
      ...     np.array([[2, 8], [8, 2], [3, 7], [8, 8]]),
      ...     2,
      ...     batch_sizes_fn=lambda seq_lens: 22 // seq_lens.sum(axis=1),
      ...     costs_fn=lambda batch_sizes, seq_lens: batch_sizes * seq_lens.sum(axis=1),
      ...     multiples=np.array([1, 1]),
      ... )
      >>> plan.seq_lens.tolist(), plan.epoch_cost
      ([[3, 8], [8, 8]], 54.0)

    Args:
      lengths: `[N, Q]` positive integers, the lengths of the sequences of each example.
      num_buckets: K, the largest number of shapes.
      batch_sizes_fn: `[n, Q]` T -> `[n]` the largest allowed B, 0 if none is.
      costs_fn: `[n]` B and `[n, Q]` T -> `[n]` the cost of a batch, positive.
      multiples: `[Q]` integers, of which every T of a sequence is a multiple.
      max_seq_lens: `[Q]` multiples of these, the longest T of each sequence; None for
        the longest length, rounded up.
      must_hold_all: whether one of the shapes must be `max_seq_lens`, so that it holds
        every other example, too.
      accumulate: the number of batches per step, all of the same shape.
      batch_size_multiple: the number of which every B is a multiple.
      min_batch_size: the smallest number of rows in a batch.
      sample: whether every B is the largest.
      starts: the T of shapes that hold all examples, `[K, Q]` each, from which the
        search also starts. The last one is the longest.

    Raises:
      ValueError: if an argument is invalid, an example is longer than `max_seq_lens`,
        or no K shapes that are allowed hold all examples.
    """
    lengths, multiples = _check_lengths(lengths, multiples)
    last = _check_last(lengths, multiples, max_seq_lens)
    points = Points.of(lengths, multiples, last, _MAX_SHAPES)
    pricing = Pricing(
        *(batch_sizes_fn, costs_fn, check_accumulate(accumulate)),
        *(batch_size_multiple, min_batch_size, sample),
    )
    if must_hold_all and not np.isfinite(pricing(last[None]).rates[0]):
        raise ValueError(
            f"`max_seq_lens={last.tolist()}` does not fit in a batch, but "
            "`must_hold_all=True` requires it. Raise the budget, or lower "
            "`max_seq_lens`."
        )
    pricing = pricing.with_unit(points.seq_lens(points.indices), len(lengths))
    problem = Search(
        points,
        pricing,
        check_positive("num_buckets", num_buckets),
        must_hold_all,
    )
    choices = itertools.chain(problem.choices(list(starts)), best_sets(problem))
    plans = [_evaluated(problem, x) for x in choices]
    if not plans:
        raise ValueError(_uncovered_message(problem))
    return min(plans, key=lambda plan: plan.epoch_cost)


def _evaluated(problem: Search, seq_lens: np.ndarray) -> JointShapes:
    """Returns a plan with some shapes, `[K, Q]` T, without those that are not used."""
    points, pricing = problem.points, dataclasses.replace(problem.pricing, unit=0.0)
    seq_lens = seq_lens[shape_order(seq_lens)]
    prices = pricing(seq_lens)
    lengths = points.seq_lens(points.indices)
    shapes = cheapest(lengths, seq_lens, prices.rates)
    counts = np.bincount(shapes, points.counts, len(seq_lens)).astype(np.int64)
    sizes = pricing.sizes(seq_lens, int(counts.sum()))
    above = dominates(seq_lens)
    rows, cost = fitted_between(sizes, counts, above)
    flow = flow_remainders_between(
        counts, rows, sizes.cost(np.arange(len(rows)), rows), above
    )
    used = flow.counts + flow.carried > 0
    if problem.must_hold_all:
        used[-1] = True
    return JointShapes(
        seq_lens=seq_lens[used],
        epoch_cost=cost,
        steady_cost=float(counts @ prices.rates),
    )


def _check_lengths(
    lengths: np.ndarray, multiples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    lengths, multiples = np.asarray(lengths), np.asarray(multiples)
    if lengths.ndim != 2 or not lengths.size or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"`lengths` has shape {lengths.shape} and dtype {lengths.dtype}. Pass "
            "integers, one row per example and one column per sequence, [N, Q]."
        )
    if lengths.min() < 1 or lengths.max() > MAX_LENGTH:
        example = int(((lengths < 1) | (lengths > MAX_LENGTH)).any(axis=1).argmax())
        raise ValueError(
            f"`lengths[{example}]={lengths[example].tolist()}`: a length must be "
            f"between 1 and {MAX_LENGTH}. Remove the example or measure it again."
        )
    return lengths, _check_sides("multiples", multiples, lengths.shape[1])


def _check_sides(name: str, values: np.ndarray, size: int) -> np.ndarray:
    """Returns one positive integer for each sequence, `[Q]` int64."""
    values = np.asarray(values)
    if values.shape != (size,) or values.dtype.kind not in "iu" or values.min() < 1:
        raise ValueError(
            f"`{name}={values.tolist()}` must be {size} positive integers, one for "
            "each sequence."
        )
    return values.astype(np.int64)


def _check_last(
    lengths: np.ndarray, multiples: np.ndarray, max_seq_lens: np.ndarray | None
) -> np.ndarray:
    """Returns the longest T of each sequence, `[Q]` int64."""
    longest = lengths.max(axis=0).astype(np.int64)
    if max_seq_lens is None:
        return -(-longest // multiples) * multiples
    last = _check_sides("max_seq_lens", max_seq_lens, len(multiples))
    if (last % multiples).any():
        raise ValueError(
            f"`max_seq_lens={last.tolist()}` are not multiples of "
            f"`multiples={multiples.tolist()}`. Use "
            f"{(-(-last // multiples) * multiples).tolist()}."
        )
    if (longest > last).any():
        example = int((lengths > last).any(axis=1).argmax())
        raise ValueError(
            f"`lengths[{example}]={lengths[example].tolist()}` is beyond "
            f"`max_seq_lens={last.tolist()}`. Raise `max_seq_lens`, or drop or "
            "truncate the example."
        )
    return last


def _uncovered_message(problem: Search) -> str:
    """Returns the error message if no shapes hold all examples."""
    points = problem.points
    frontier = points.seq_lens(points.frontier())
    alone = problem.pricing(frontier).rates
    if not np.isfinite(alone).all():
        shape = frontier[int(np.argmin(np.isfinite(alone)))].tolist()
        return (
            f"No batch of the shape {shape} is allowed, but an example needs it. Raise "
            "the budget, or drop or truncate the example."
        )
    return (
        f"`num_buckets={problem.num_buckets}`: no choice of so few shapes was found "
        "that holds all examples, because the budget excludes the longest shapes. "
        "Raise `num_buckets` or the budget."
    )
