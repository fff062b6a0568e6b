"""A local search for shapes: they are added, dropped and swapped, one at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.plan.flow.dominance import dominates, fits, shape_order
from jaxbucket.plan.joint_points import Points
from jaxbucket.plan.joint_pricing import Prices, Pricing
from jaxbucket.plan.joint_swaps import Assignment, Grid, Swaps

# With more distinct examples, or examples times buckets, only some T are possible.
# They are refined later.
_MAX_POINTS, _POINTS_WORK = 1 << 16, 1 << 19
# The number of shapes that can replace one, and this number times that of buckets.
_MAX_GRID, _GRID_WORK = 4096, 1 << 16
# The distances between a T and its nearest neighbors, powers of a base, by the number
# of sequences: the base, and the number of powers.
_POWERS = {2: (2, 6), 3: (3, 3), 4: (4, 2)}
_FEW_POWERS = (4, 1)
# How many of the best shapes by full batches are compared with their remainders. With
# many buckets, fewer are, because the time of each grows with the square of K.
_MIN_CONTENDERS, _MAX_CONTENDERS, _CONTENDERS_WORK = 4, 64, 1 << 14
# The number of swaps that are tried with remainders: for each bucket on average, and
# times the number of buckets, because the time of each grows with it.
_TRIES, _TRIES_WORK = 16, 1 << 13
# A choice counts as cheaper only beyond rounding errors.
_SLACK = 1 - 1e-9
# How much a remainder is expected to fill up a batch at its target: with 0, each of its
# rows costs what a row costs there, and with 1, all rows may need a new batch.
_CAUTION = 0.0, 0.5, 1.0
# The number of points that are joined at a time.
_JOINED = 1024
# All sets of shapes are compared if the product of their number, of the shapes in each
# and of the points is at most this. So many of the best sets are returned.
_MAX_WORK, _NUM_BEST = 2_000_000, 8

# Returns the shapes that can replace shape k of the given shapes, or that can be added
# as shape k = K.
GridFn: TypeAlias = Callable[[np.ndarray, int], Grid]


@dataclasses.dataclass(frozen=True)
class Search:
    """A local search for at most K shapes.

    Shapes are `[K, Q]` indices of T. If one of them must hold every other, it is the
    first and is never swapped.

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
          starts: the T of known shapes, which are yielded, and improved. The last one
            is the largest, as in a plan; within the search, it comes first.
        """
        coarse = dataclasses.replace(self, points=self._coarse(None))
        results = []
        if (shapes := coarse._first()) is not None:
            results.append(coarse._improved(shapes))
        for start in starts:
            if self.must_hold_all:
                last = self.points.seq_lens(self.points.last[None])
                start = np.concatenate([last, start[:-1]])
            yield start
            results.append(coarse._with_remainders(coarse.points.indices_of(start)))
        yield from map(coarse.points.seq_lens, results)
        if results and coarse.points is not self.points:
            best = min(
                results, key=lambda shapes: coarse._cost(coarse._assigned(shapes))
            )
            yield self._refined(coarse.points.seq_lens(best))

    def best_sets(self) -> Iterator[np.ndarray]:
        """Yields the T of the best of all sets of K shapes, if these are not too many.

        With few examples, the best shapes by full batches may be far from the best.
        """
        axes = [np.arange(len(values)) for values in self.points.values]
        size, work = math.prod(map(len, axes)), self.num_buckets * len(self.points)
        if max(size, work * math.comb(size, min(size, self.num_buckets))) > _MAX_WORK:
            return
        grid = Grid.of(self.points, axes, self.pricing)
        rates = np.where(
            fits(self.points.indices, grid.shapes), grid.prices.rates, np.inf
        )
        used = np.flatnonzero(np.isfinite(rates).any(axis=0))
        if not len(used):
            return
        number = min(self.num_buckets, len(used))
        sets = np.array(list(itertools.combinations(used, number))).reshape(-1, number)
        if self.must_hold_all:
            sets = sets[sets[:, -1] == size - 1]
        sets = sets[np.isfinite(rates[:, sets].min(axis=2)).all(axis=0)]
        cheapest = rates[:, sets].argmin(axis=2)[:, :, None] == np.arange(number)
        counts = np.tensordot(self.points.counts, cheapest, axes=1)
        seq_lens = self.points.seq_lens(grid.shapes)[sets]
        costs = estimated_costs(counts, seq_lens, self.pricing)
        yield from seq_lens[np.argsort(costs, kind="stable")[:_NUM_BEST]]

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

    def _assigned(self, shapes: np.ndarray) -> Assignment:
        return Assignment.of(self.points, shapes, self.pricing)

    def _first(self) -> np.ndarray | None:
        """Returns shapes for full batches; None if too many are needed."""
        shapes = self.points.last[None] if self.must_hold_all else self._covering()
        if shapes is None or len(shapes) > self.num_buckets:
            shapes = few_shapes(self.points, self.pricing)
        if shapes is None or len(shapes) > self.num_buckets:
            return None
        return self._swapped(self._grown(shapes), self._anywhere)

    def _covering(self) -> np.ndarray | None:
        """Returns shapes of the grid, each of which holds most of what is left."""
        shapes, left = [], self.points.frontier()
        grid = self._grid.shapes[np.isfinite(self._grid.prices.rates)]
        while len(left) and len(grid):
            held = fits(left, grid)
            best = held.sum(axis=0).argmax()
            if not held[:, best].any():
                break
            shapes.append(grid[best])
            left = left[~held[:, best]]
        return None if len(left) else np.array(shapes)

    def _improved(self, shapes: np.ndarray) -> np.ndarray:
        """Returns better shapes: first for full batches, then with remainders."""
        return self._with_remainders(self._swapped(shapes, self._near))

    def _with_remainders(self, shapes: np.ndarray) -> np.ndarray:
        """Returns shapes with a cheaper epoch, remainders included."""
        for grid_of in (self._anywhere, self._near):
            shapes = self._swapped_with_remainders(shapes, grid_of)
        return shapes

    def _grown(self, shapes: np.ndarray) -> np.ndarray:
        """Returns K shapes for full batches, by adding the best one at a time."""
        while len(shapes) < self.num_buckets:
            assignment = self._assigned(shapes)
            costs = Swaps(assignment, self._grid).costs
            best = int(np.argmin(costs))
            if not costs[best] < assignment.cost * _SLACK:
                break
            shapes = np.append(shapes, self._grid.shapes[[best]], axis=0)
        return shapes

    def _swapped(self, shapes: np.ndarray, grid_of: GridFn) -> np.ndarray:
        """Returns shapes of which none can be swapped for cheaper full batches."""
        assignment, failures, k = self._assigned(shapes), 0, int(self.must_hold_all)
        while failures < len(shapes) - self.must_hold_all:
            grid = grid_of(shapes, k)
            costs = Swaps(assignment, grid, without=k).costs
            best = int(np.argmin(costs))
            failures += 1
            if costs[best] < assignment.cost * _SLACK:
                shapes = shapes.copy()
                shapes[k] = grid.shapes[best]
                assignment, failures = self._assigned(shapes), 0
            k = k + 1 if k + 1 < len(shapes) else int(self.must_hold_all)
        return shapes

    def _swapped_with_remainders(
        self, shapes: np.ndarray, grid_of: GridFn
    ) -> np.ndarray:
        """Returns shapes with a cheaper epoch by adding, dropping or swapping some."""
        number, fixed = self.num_buckets, int(self.must_hold_all)
        most_tries = max(min(_TRIES * number, _TRIES_WORK // number), number)
        assignment, failures, k = self._assigned(shapes), 0, fixed
        cost = self._cost(assignment)
        for _ in range(most_tries):
            size = len(assignment) + (len(assignment) < number)
            if failures >= size - fixed:
                break
            k = k if k < size else fixed
            grid = grid_of(assignment.shapes, k)
            better, better_cost = self._best_swap(assignment, k, grid, cost)
            failures += 1
            if better_cost < cost * _SLACK:
                assignment, cost, failures = self._assigned(better), better_cost, 0
            k += 1
        return assignment.shapes

    def _best_swap(
        self, assignment: Assignment, k: int, grid: Grid, limit: float
    ) -> tuple[np.ndarray, float]:
        """Returns the best shapes without shape k or with another instead of it.

        Args:
          assignment: the present shapes.
          k: the shape to replace, or K to add one.
          grid: the shapes that can replace it.
          limit: shapes that cost more are of no interest.

        Returns:
          The shapes, and about the cost of their epoch.
        """
        without = k if k < len(assignment) else None
        others, best_cost = assignment.shapes, np.inf
        if without is not None:
            others = np.delete(assignment.shapes, k, axis=0)
            best_cost = self._cost(assignment, k)
        swaps = Swaps(assignment, grid, without)
        promising = np.flatnonzero(swaps.costs < min(limit, best_cost))
        cheapest = np.argsort(swaps.costs[promising], kind="stable")
        work = _CONTENDERS_WORK // self.num_buckets**2
        added = promising[cheapest[: min(max(work, _MIN_CONTENDERS), _MAX_CONTENDERS)]]
        if not added.size:
            return others, best_cost
        counts, new = swaps.counts(added), grid.shapes[added]
        if without is not None:
            counts = np.delete(counts, without, axis=1)
        repeated = np.broadcast_to(others, (len(added), *others.shape))
        costs = self._costs(counts, np.concatenate([repeated, new[:, None]], axis=1))
        best = int(np.argmin(costs))
        if costs[best] < best_cost:
            return np.insert(others, k, new[best], axis=0), float(costs[best])
        return others, best_cost

    def _cost(self, assignment: Assignment, without: int | None = None) -> float:
        """Returns about the cost of an epoch; infinite if a point is in no shape."""
        counts = assignment.counts(assignment.cheapest(without)).astype(np.int64)
        if counts[-1]:
            return np.inf
        counts, shapes = counts[:-1], assignment.shapes
        if without is not None:
            counts, shapes = np.delete(counts, without), np.delete(shapes, without, 0)
        return float(self._costs(counts[None], shapes[None])[0])

    def _costs(self, counts: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """Returns the cost of an epoch with each choice, `[n, K, Q]` indices."""
        return estimated_costs(counts, self.points.seq_lens(choices), self.pricing)


def few_shapes(points: Points, pricing: Pricing) -> np.ndarray | None:
    """Returns shapes that hold all points, `[K, Q]` indices; None if one is too long.

    Points that no other point dominates are joined in the order of one sequence, as
    long as the budget allows. With two sequences, the other one falls in this order, so
    no fewer shapes hold them, if the budget allows every shape that another allowed
    shape holds. With more sequences, the best of the orders is taken.
    """
    frontier = points.frontier()
    choices = [
        _joined(frontier[np.argsort(column, kind="stable")], points, pricing)
        for column in frontier.T
    ]
    complete = [shapes for shapes in choices if shapes is not None]
    return min(complete, key=len, default=None)


def _joined(
    frontier: np.ndarray, points: Points, pricing: Pricing
) -> np.ndarray | None:
    """Returns the joins of consecutive points, each as long as is allowed."""
    shapes, first = [], 0
    while first < len(frontier):
        joins = np.maximum.accumulate(frontier[first : first + _JOINED], axis=0)
        is_allowed = np.isfinite(pricing(points.seq_lens(joins)).rates)
        if not is_allowed[0]:
            return None
        number = int(np.argmin(np.append(is_allowed, False)))
        shapes.append(joins[number - 1])
        first += number
    return np.array(shapes)


def estimated_costs(
    counts: np.ndarray, seq_lens: np.ndarray, pricing: Pricing
) -> np.ndarray:
    """Returns the cost of an epoch with each of several choices of shapes, `[n]`.

    A bucket either holds all its rows in the smallest steps, or fills the largest steps
    and passes on the rest to where it is expected to cost least. So the cost may be
    above that of `fitted_between`, but is much faster to compute.

    Args:
      counts: `[n, K]` integers, the examples of each shape.
      seq_lens: `[n, K, Q]` integers, the T of each shape, in any order.
      pricing: the prices of shapes.
    """
    order = shape_order(seq_lens)
    seq_lens = np.take_along_axis(seq_lens, order[:, :, None], axis=1)
    counts = np.take_along_axis(counts, order, axis=1)
    prices = pricing(seq_lens.reshape(-1, seq_lens.shape[-1]))
    columns = [counts, *(column.reshape(counts.shape) for column in prices)]
    # All choices are computed at once, with every degree of caution.
    rows, *columns = (np.tile(x, (len(_CAUTION), 1)) for x in columns)
    above = np.tile(dominates(seq_lens), (len(_CAUTION), 1, 1))
    caution = np.repeat(_CAUTION, len(order))[:, None]
    prices, total, every = Prices(*columns), np.zeros(len(rows)), np.arange(len(rows))
    for k in range(rows.shape[1] - 1):
        here, later = prices.part(k), prices.part(slice(k + 1, None))
        full, rest = np.divmod(rows[:, k], here.batch_sizes)
        before, extra = rows[:, k + 1 :], rest[:, None]
        more = pricing.padded_costs(before + extra, later)
        more -= pricing.padded_costs(before, later)
        passed = caution * more + (1 - caution) * extra * later.rates
        passed[~above[:, k, k + 1 :]] = np.inf
        best = passed.argmin(axis=1)
        alone, filled = pricing.padded_costs(rows[:, k], here), full * here.costs
        is_padded = (rest == 0) | (filled + passed[every, best] >= alone)
        total += np.where(is_padded, alone, filled)
        rows[every, k + 1 + best] += np.where(is_padded, 0, rest)
    total += pricing.padded_costs(rows[:, -1], prices.part(-1))
    return total.reshape(len(_CAUTION), -1).min(axis=0)
