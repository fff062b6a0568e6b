"""Compares all sets of shapes, if there are few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.additions import Grid
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.joint_epoch import epoch_costs
from jaxbucket.plan.joint_search import Search
from jaxbucket.plan.pricing import Prices

# The largest product of the numbers of sets, of shapes in each, and of points.
_MAX_WORK = 2_000_000
# How many of the best sets by estimated cost are returned.
_NUM_BEST = 8


def best_sets(problem: Search) -> Iterator[np.ndarray]:
    """Yields the T of the best sets of K shapes, `[K, Q]`, unless there are too many.

    Args:
      problem: the points and prices.
    """
    points, number = problem.points, problem.num_buckets
    size = math.prod(map(len, points.values))
    work = math.comb(size, min(number, size)) * number * len(points)
    if size > _MAX_WORK or work > _MAX_WORK:
        return
    axes = [np.arange(len(values)) for values in points.values]
    grid = Grid.of(points, axes, problem.pricing)
    held = fits(points.indices, grid.shapes)
    allowed = np.isfinite(grid.prices.rates) & held.any(axis=0)
    held, shapes = held[:, allowed], grid.shapes[allowed]
    prices = Prices(*(column[allowed] for column in grid.prices))
    sets = itertools.combinations(range(len(shapes)), min(number, len(shapes)))
    chosen = np.array(list(sets)).reshape(-1, min(number, len(shapes)))
    if problem.must_hold_all:
        # The last shape holds every other.
        chosen = chosen[chosen[:, -1] == len(shapes) - 1]
    paid = np.where(held, prices.rates, np.inf)[:, chosen]
    chosen = chosen[np.isfinite(paid.min(axis=2)).all(axis=0)]
    if not chosen.size:
        return
    paid = np.where(held, prices.rates, np.inf)[:, chosen]
    cheapest = paid.argmin(axis=2) + np.arange(len(chosen)) * chosen.shape[1]
    weights = np.repeat(points.counts, len(chosen))
    counts = np.bincount(cheapest.ravel(), weights, chosen.size)
    seq_lens = points.seq_lens(shapes)[chosen]
    costs = epoch_costs(
        counts.reshape(chosen.shape).astype(np.int64),
        seq_lens,
        Prices(*(column[chosen] for column in prices)),
        problem.pricing,
    )
    yield from seq_lens[np.argsort(costs, kind="stable")[:_NUM_BEST]]
