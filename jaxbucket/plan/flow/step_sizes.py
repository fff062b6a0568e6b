"""`StepSizes`: how many rows the steps of a shape may have, and what they cost.

The largest B is only a bound. Rows that take s batches of it also fit in s batches of a
smaller B, which leaves fewer rows empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

# Costs are computed for at most this many B of each shape, and for about this many
# shapes and B in all. If they are not linear in B, only these B are possible.
_MAX_KNOTS, _MAX_COSTS = 128, 1 << 14
# The relative deviation from a line, beyond rounding errors.
_SLACK = 1e-9


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The numbers of rows that a step of each of G shapes may have, and their costs.

    A step of fewer rows than the largest number holds fewer rows, but costs less.

    Attributes:
      multiples: `[G]` int64, the number of which those of each shape are multiples.
      knots: `[L]` int64, numbers of rows, increasing.
      least: `[G]` int64, the smallest number of rows of each shape.
      most: `[G]` int64, the largest number of rows of each shape.
      costs: `[G, L]`, the cost of a step that holds the rows of each knot, or `most` if
        that is less; non-decreasing along a row.
      holders: `[G, L]` int64, the rows of this step, which are more if that costs less.
      is_linear: whether all multiples between the knots are possible, too, at costs
        that are linear in between.
    """

    multiples: np.ndarray
    knots: np.ndarray
    least: np.ndarray
    most: np.ndarray
    costs: np.ndarray
    holders: np.ndarray
    is_linear: bool = True

    @classmethod
    def of(
        cls,
        batch_sizes: np.ndarray,
        costs_fn: Callable[[np.ndarray, np.ndarray], np.ndarray],
        examples: np.ndarray,
        multiples: np.ndarray,
        smallest: np.ndarray,
        accumulate: int,
        sample: bool,
        is_linear: bool = False,
    ) -> StepSizes:
        """Returns the sizes of G shapes.

        Args:
          batch_sizes: `[G]` int64, the largest B that the budget allows.
          costs_fn: `[n]` shapes and `[n]` B -> `[n]`, the cost of a batch.
          examples: `[G]` int64, the largest number of examples of each shape. No B is
            larger than these fill.
          multiples: `[G]` int64, the number of which every B is a multiple.
          smallest: `[G]` int64, the smallest B, a multiple of this number.
          accumulate: the number of batches per step, all of the same shape.
          sample: whether there are more examples, so that every B is the largest.
          is_linear: whether costs are known to be linear in B, so that two of them are
            enough.
        """
        filled = -(-examples // (multiples * accumulate)) * multiples
        # Other costs may be lower for a larger batch.
        filled = np.maximum(filled if is_linear else 2 * filled, smallest)
        most = batch_sizes if sample else np.minimum(batch_sizes, filled)
        number = 2 if is_linear else max(2, _MAX_COSTS // max(len(most), 1))
        least = int(smallest.min()) if len(smallest) else 1
        largest = int(most.max(initial=least))
        common = int(np.lcm.reduce(multiples, initial=1))
        first = -(-least // common) * common
        knots = _knots(
            largest if sample else first, max(first, largest), common, number
        )
        # Shapes with other multiples may have a smaller or a larger number of rows.
        knots = np.unique([*knots, least, largest]) if not sample else knots
        low = most if sample else smallest
        rows = np.clip(knots, low[:, None], most[:, None])
        shapes = np.repeat(np.arange(len(most)), len(knots))
        costs = costs_fn(shapes, rows.ravel()).reshape(rows.shape)
        if not is_linear and not sample and len(knots) > 2 and _on_a_line(rows, costs):
            args = (batch_sizes, costs_fn, examples, multiples, smallest)
            return cls.of(*args, accumulate, sample, is_linear=True)
        # A batch that holds more rows and costs less holds these rows, too.
        cheapest = np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1]
        places = np.where(costs <= cheapest, np.arange(len(knots)), len(knots))
        places = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]
        return cls(
            multiples * accumulate,
            knots * accumulate,
            low * accumulate,
            most * accumulate,
            cheapest * accumulate,
            np.take_along_axis(rows, places, axis=1) * accumulate,
            is_linear,
        )

    @functools.cached_property
    def multiple(self) -> int:
        """The number of which the rows of all shapes are multiples."""
        return int(np.gcd.reduce(self.multiples))

    @property
    def rows(self) -> np.ndarray:
        """`[G, L]`: the rows of the steps whose costs are given."""
        return np.clip(self.knots, self.least[:, None], self.most[:, None])

    @functools.cached_property
    def _slopes(self) -> np.ndarray:
        """`[G, L]`: the cost of a row between each knot and the previous one."""
        rows = self.rows
        width = np.maximum(np.diff(rows, axis=1, prepend=rows[:, :1]), 1)
        rise = np.diff(self.costs, axis=1, prepend=self.costs[:, :1])
        return rise // width if rise.dtype.kind == "i" else rise / width

    def row_costs(self) -> np.ndarray:
        """Returns the cost of a row in steps of the known costs, `[G, L]`."""
        is_integer = self.costs.dtype.kind == "i"
        return self.costs // self.rows if is_integer else self.costs / self.rows

    def rates(self) -> np.ndarray:
        """Returns the least cost of a row in this shape or a later one, `[G]`."""
        return np.minimum.accumulate(self.row_costs().min(axis=1)[::-1])[::-1]

    def take(self, index: np.ndarray) -> StepSizes:
        """Returns the sizes of some of the shapes."""
        names = ("multiples", "least", "most", "costs", "holders")
        columns = {name: getattr(self, name)[index] for name in names}
        return dataclasses.replace(self, **columns)

    def cost(self, shape: np.ndarray | int, rows: np.ndarray) -> np.ndarray:
        """Returns the cost of a step of some rows, `[n]`.

        Args:
          shape: `[n]` integers, the indices of shapes; or one for all rows.
          rows: `[n]` integers, possible numbers of rows of a step of this shape.
        """
        upper = np.searchsorted(self.knots, rows)
        excess = np.minimum(self.knots[upper], self.most[shape]) - rows
        return self.costs[shape, upper] - self._slopes[shape, upper] * excess

    def holding(self, shape: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of the cheapest steps that hold some rows, `[n]`."""
        upper = np.searchsorted(self.knots, rows)
        is_known = rows == np.minimum(self.knots[upper], self.most[shape])
        return np.where(is_known, self.holders[shape, upper], rows)

    def padded(
        self, shape: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the smallest steps that hold all rows in as few steps as possible.

        These are the rows of a step, `[n]`, and the number of steps, `[n]`.
        """
        steps = -(-rows // self.most[shape])
        multiples = self.multiples[shape]
        size = -(-rows // (np.maximum(steps, 1) * multiples)) * multiples
        size = np.maximum(size, self.least[shape])
        if not self.is_linear:
            upper = self.knots[np.searchsorted(self.knots, size)]
            size = np.minimum(upper, self.most[shape])
        return size, steps

    def padded_costs(self, shape: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the cost of the steps of `padded`, `[n]`."""
        size, steps = self.padded(shape, rows)
        return steps * self.cost(shape, size)

    def filled(
        self, shape: np.ndarray, rows: np.ndarray, most_sizes: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns steps without empty rows, whose remainder is promoted.

        The steps are as few as possible for the rows that they hold, and the remainder
        does not fill another one.

        Args:
          shape: `[n]` integers, the indices of shapes.
          rows: `[n]` integers, the rows.
          most_sizes: for each number of steps, only so many of the largest steps are
            returned.

        Returns:
          For every possible size of a step, `[m]`: the index in `shape`, the rows of a
          step, the number of steps, and whether smaller steps were left out after it.
        """
        most, multiple = self.most[shape], self.multiples[shape]
        full = rows // most
        # The number of steps is rounded down, if that is not 0, and up.
        down, up = np.flatnonzero(full), np.flatnonzero(rows > full * most)
        parent = np.concatenate([down, up])
        steps = np.concatenate([full[down], full[up] + 1])
        shape, rows, multiple = shape[parent], rows[parent], multiple[parent]
        largest, least = most[parent] // multiple, self.least[shape] // multiple
        # The largest and the smallest step with a remainder, in multiples.
        high = np.minimum(largest, (rows - 1) // (steps * multiple))
        low = np.maximum(least, rows // ((steps + 1) * multiple) + 1)
        low = np.maximum(low, (steps - 1) * largest // steps + 1)
        if not self.is_linear:
            # Places of knots, of which the last one stands for the largest step.
            last = np.searchsorted(self.knots, self.most[shape])
            below = np.searchsorted(self.knots, high * multiple, side="right") - 1
            low = np.searchsorted(self.knots, low * multiple)
            high = np.where(high == largest, last, below)
        number = np.minimum(np.maximum(high - low + 1, 0), most_sizes)
        case = np.repeat(np.arange(len(rows)), number)
        place = (high + np.cumsum(number) - number)[case] - np.arange(len(case))
        last = np.where(high - low < most_sizes, -1, high - most_sizes + 1)
        size = place * multiple[case]
        if not self.is_linear:
            size = np.minimum(self.knots[place], self.most[shape[case]])
        return parent[case], size, steps[case], place == last[case]


def _on_a_line(rows: np.ndarray, costs: np.ndarray) -> bool:
    """Returns whether the costs of all shapes are linear in their rows."""
    width = np.maximum(rows[:, -1:] - rows[:, :1], 1)
    shares = (rows - rows[:, :1]) / width
    line = costs[:, :1] + shares * (costs[:, -1:] - costs[:, :1])
    return bool((abs(costs - line) <= _SLACK * costs).all())


def _knots(least: int, most: int, multiple: int, number: int) -> np.ndarray:
    """Returns B from the smallest to the largest, at most about `number`, `[L]`.

    If they are not all possible B, they are multiples of powers of two, as many in each
    octave.
    """
    total = most // multiple
    number = min(number, _MAX_KNOTS)
    if total - least // multiple < number:
        return np.arange(least, most + 1, multiple)
    octaves = total.bit_length()
    per_octave = 1 << max(0, (number // octaves).bit_length() - 1)
    steps = np.repeat(1 << np.arange(octaves), per_octave)
    places = np.arange(per_octave, 2 * per_octave)
    inner = np.tile(places, octaves) * steps
    inner = np.unique(np.append(np.arange(1, per_octave), inner)) * multiple
    inner = inner[(inner > least) & (inner < most)] if number > 2 else inner[:0]
    return np.concatenate([[least], inner, [most]])
