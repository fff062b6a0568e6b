"""A lower bound of the cost of an epoch with any K shapes."""

from __future__ import annotations

import numpy as np

from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.joint.additions import Choice, Grid
from jaxbucket.plan.joint.fine_grid import FineGrid, lowest_rates
from jaxbucket.plan.joint.points import Points
from jaxbucket.plan.joint.relaxation import Relaxation
from jaxbucket.plan.joint.search import Search

# The most shapes that are all part of the relaxed problem, and the most after rounding.
_MAX_SHAPES, _MAX_ROUNDED = 1024, 2048
# The steps of the subgradient method: at first, and after each round of new shapes.
_FIRST_STEPS, _MORE_STEPS, _ROUNDS = 400, 120, 3
# The number of new shapes of a round.
_MAX_NEW = 256
# Makes up for rounding errors.
_SLACK = 1 - 1e-9


def lower_bound(problem: Search, seq_lens: np.ndarray) -> float:
    """Returns a lower bound of the cost of an epoch, for all choices of shapes.

    It holds if no B has a lower cost of a row than the largest.

    Args:
      problem: the points and prices.
      seq_lens: `[K, Q]` T of known shapes.
    """
    sizes = [len(values) for values in problem.points.values]
    if np.prod(sizes, dtype=np.float64) <= _MAX_SHAPES:
        return _safe(problem, _complete_bound(problem, seq_lens))
    bounds = _grouped_bound(problem, seq_lens), _rounded_bound(problem, seq_lens)
    return _safe(problem, max(bounds))


def _complete_bound(problem: Search, seq_lens: np.ndarray) -> float:
    """Returns a bound from a price for each point, with every possible shape."""
    points = problem.points
    grid = Grid.of(points, [np.arange(len(x)) for x in points.values], problem.pricing)
    relaxation = _relaxation(problem, points, grid.prices.rates)
    paid = _paid(problem, points, seq_lens)
    prices = relaxation.best_prices(paid, paid, _FIRST_STEPS)
    return relaxation.total(prices, relaxation.collected(prices))


def _grouped_bound(problem: Search, seq_lens: np.ndarray) -> float:
    """Returns a bound from a price for each group of similar points.

    The relaxed problem has shapes on a coarse grid at first. Then it is computed what
    all other shapes collect, and those that collect most are added.
    """
    fine = FineGrid.of(problem.points, problem.pricing)
    axes = fine.points.quantiles(_side(problem, _MAX_SHAPES))
    cells = fine.points.restricted(axes)
    rates = Grid.of(fine.points, axes, problem.pricing).prices.rates
    relaxation = _relaxation(problem, cells, rates)
    groups = _row_of(cells.indices_of(fine.points.seq_lens(fine.points.indices)), cells)
    paid = _paid(problem, cells, seq_lens)
    prices, best, steps = paid, 0.0, _FIRST_STEPS
    for _ in range(_ROUNDS):
        prices = relaxation.best_prices(paid, prices, steps)
        collected = fine.collected(prices[groups])
        best = max(best, _total(problem, float(prices @ cells.counts), collected))
        new = fine.best_of_cells(collected, axes)
        new = new[np.argsort(-collected[new], kind="stable")[:_MAX_NEW]]
        relaxation = fine.extended(relaxation, groups, new)
        steps = _MORE_STEPS
    return best


def _rounded_bound(problem: Search, seq_lens: np.ndarray) -> float:
    """Returns a bound from a problem that is cheaper for each set of shapes.

    Neighbors on a grid are treated as one: a shape that holds what the longest of them
    holds, at the lowest rate of them.
    """
    points = problem.points
    axes = points.quantiles(_side(problem, _MAX_ROUNDED))
    cells, rates = points.restricted(axes), lowest_rates(points, axes, problem.pricing)
    relaxation = _relaxation(problem, cells, rates)
    paid = _paid(problem, cells, seq_lens)
    prices = relaxation.best_prices(paid, paid, _FIRST_STEPS)
    return relaxation.total(prices, relaxation.collected(prices))


def _safe(problem: Search, bound: float) -> float:
    """Returns a bound without the effect of rounded rates."""
    return bound * _SLACK - problem.pricing.unit * problem.points.counts.sum()


def _side(problem: Search, size: int) -> int:
    """Returns the number of T of each sequence on a grid of about `size` shapes."""
    return int(size ** (1 / len(problem.points.values)))


def _total(problem: Search, paid: float, collected: np.ndarray) -> float:
    """Returns the lower bound from what examples pay and all shapes collect."""
    fixed = collected[-1:] if problem.must_hold_all else collected[:0]
    free = np.sort(collected[: len(collected) - len(fixed)])
    number = problem.num_buckets - len(fixed)
    return paid - float(fixed.sum() + free[len(free) - number :].sum())


def _relaxation(problem: Search, points: Points, rates: np.ndarray) -> Relaxation:
    """Returns the relaxed problem with all combinations of T of the points.

    Args:
      problem: the number of shapes.
      points: the examples, in groups.
      rates: `[C]` float64, the cost of a row of each combination.
    """
    sizes = tuple(map(len, points.values))
    shapes = np.stack(np.unravel_index(np.arange(len(rates)), sizes), axis=1)
    allowed = np.isfinite(rates)
    shapes, groups = np.nonzero(fits(points.indices, shapes).T & allowed[:, None])
    counts = points.counts.astype(np.float64)
    return Relaxation(
        counts,
        np.where(allowed, rates, 0),
        groups,
        shapes,
        counts[groups],
        problem.num_buckets,
        len(rates) - 1 if problem.must_hold_all else None,
    )


def _paid(problem: Search, points: Points, seq_lens: np.ndarray) -> np.ndarray:
    """Returns what an example of each point pays on average in known shapes, `[P]`."""
    finer = problem.points
    choice = Choice.of(finer, finer.indices_of(seq_lens), problem.pricing)
    groups = _row_of(points.indices_of(finer.seq_lens(finer.indices)), points)
    paid = np.bincount(groups, choice.rates[choice.first] * finer.counts, len(points))
    return paid / points.counts


def _row_of(indices: np.ndarray, points: Points) -> np.ndarray:
    """Returns which point has some indices of T, `[n]`, from `[n, Q]`."""
    sizes = tuple(map(len, points.values))
    known, wanted = (
        np.ravel_multi_index([*x.T], sizes) for x in (points.indices, indices)
    )
    return np.searchsorted(np.atleast_1d(known), np.atleast_1d(wanted))
