"""A local search for shapes, from coarse to fine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxbucket.plan.additions import Grid
from jaxbucket.plan.flow.dominance import fits
from jaxbucket.plan.joint_epoch import EpochSearch, epoch_costs
from jaxbucket.plan.points import Points
from jaxbucket.plan.pricing import Prices, Pricing
from jaxbucket.plan.steady import Steady, few_shapes

# With more distinct examples, only some T are possible, which are refined later: at
# most, and times the number of buckets.
_MAX_POINTS, _POINTS_WORK = 1 << 16, 1 << 19
# The number of shapes that can replace one: at most, and times the number of buckets.
_MAX_GRID, _GRID_WORK = 4096, 1 << 16
# The distances between a T and its nearest neighbors, powers of a base, by the number
# of sequences: the base, and the number of powers.
_POWERS = {1: (2, 8), 2: (2, 6), 3: (3, 3), 4: (4, 2)}
_FEW_POWERS = (4, 1)


@dataclasses.dataclass(frozen=True)
class Search:
    """A local search for at most K shapes.

    Attributes:
      points: the examples, with all possible T.
      pricing: the prices of shapes.
      num_buckets: the largest number of shapes.
      must_hold_all: whether one of the shapes must hold every other.
    """

    points: Points
    pricing: Pricing
    num_buckets: int
    must_hold_all: bool

    def choices(self, starts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the T of several choices of shapes, `[K, Q]` each.

        There are none if no K shapes were found that hold all examples.

        Args:
          starts: the T of known shapes, which are yielded, and improved.
        """
        coarse = dataclasses.replace(self, points=self._coarse(None))
        results = []
        if (shapes := coarse._first()) is not None:
            results.append(coarse._improved(shapes))
        for start in starts:
            if self.must_hold_all:
                # The first shape is never replaced.
                last = self.points.seq_lens(self.points.last[None])
                start = np.concatenate([last, start[:-1]])
            yield start
            results.append(coarse._with_remainders(coarse.points.indices_of(start)))
        yield from map(coarse.points.seq_lens, results)
        if results and coarse.points is not self.points:
            best = min(results, key=coarse._epoch.cost)
            yield self._refined(coarse.points.seq_lens(best))

    def _refined(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the T of shapes, `[K, Q]`, after a search with more possible T."""
        points = self._coarse(self.points.indices_of(seq_lens))
        fine = dataclasses.replace(self, points=points)
        return points.seq_lens(fine._improved(points.indices_of(seq_lens)))

    def _coarse(self, shapes: np.ndarray | None) -> Points:
        """Returns the points with fewer T, but all T near those of some shapes."""
        points, size = self.points, 2048
        while len(points) > min(_MAX_POINTS, _POINTS_WORK // self.num_buckets):
            axes = self.points.quantiles(size)
            if shapes is not None:
                near = self.points.near(shapes, self._offsets)
                axes = [np.union1d(*pair) for pair in zip(axes, near, strict=True)]
            points = self.points.restricted(axes)
            if size == 1:
                break
            size //= 2
        return points

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        base, number = _POWERS.get(len(self.points.values), _FEW_POWERS)
        steps = base ** np.arange(number)
        return np.concatenate([-steps[::-1], [0], steps])

    @functools.cached_property
    def _grid(self) -> Grid:
        """Shapes all over the range of lengths."""
        size = min(_MAX_GRID, _GRID_WORK // self.num_buckets)
        side = max(2, int(size ** (1 / len(self.points.values))))
        return Grid.of(self.points, self.points.quantiles(side), self.pricing)

    def _near(self, shapes: np.ndarray, k: int) -> Grid:
        """Returns the neighbors of shape k, or the whole grid for a new shape."""
        if k == len(shapes):
            return self._grid
        axes = self.points.near(shapes[[k]], self._offsets)
        return Grid.of(self.points, axes, self.pricing)

    def _anywhere(self, shapes: np.ndarray, k: int) -> Grid:
        return self._grid

    @property
    def _num_fixed(self) -> int:
        return int(self.must_hold_all)

    @property
    def _steady(self) -> Steady:
        return Steady(self.points, self.pricing, self.num_buckets, self._num_fixed)

    @property
    def _epoch(self) -> EpochSearch:
        return EpochSearch(self.points, self.pricing, self.num_buckets, self._num_fixed)

    def _first(self) -> np.ndarray | None:
        """Returns shapes for full batches, `[K, Q]` indices."""
        steady, grid = self._steady, self._grid
        fixed = self.points.last[None][: self._num_fixed]
        shapes = steady.covered(fixed, grid)
        if len(shapes) > self.num_buckets or not steady.choice(shapes).is_complete:
            shapes = few_shapes(self.points, self.pricing)
        if shapes is None or len(shapes) > self.num_buckets:
            return None
        shapes = steady.grown(shapes, self._grid, self.num_buckets)
        return steady.swapped(shapes, self._anywhere)

    def _improved(self, shapes: np.ndarray) -> np.ndarray:
        """Returns better shapes: first for full batches, then with remainders."""
        return self._with_remainders(self._steady.swapped(shapes, self._near))

    def _with_remainders(self, shapes: np.ndarray) -> np.ndarray:
        """Returns shapes with a cheaper epoch, remainders included."""
        shapes = self._epoch.improved(shapes, self._anywhere)
        return self._epoch.improved(shapes, self._near)


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
