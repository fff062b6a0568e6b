"""The best number of buckets: compile time against the epoch time that it saves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_float, check_lengths, check_positive
from jaxbucket.base.lengths import Lengths, lengths_matrix
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.base.table import Record
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.costs import SECONDS, unit_of
from jaxbucket.plan.flow.remainder import epoch_cost, epoch_flow
from jaxbucket.plan.formatting import count_shapes, format_cost, number_table
from jaxbucket.plan.histogram import example_counts
from jaxbucket.plan.joint_planner import plan_sequences
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.optimal import Optimum

# How many numbers of buckets are tried per doubling. Up to twice this number, all are.
_SIZES_PER_DOUBLING = 32
# The same for examples with several sequences, whose plans take longer.
_FEW_PER_DOUBLING = 4
# The number of points after the best one, so that plots show the minimum.
_POINTS_BEYOND = 4


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The best plan with a given number of buckets.

    Attributes:
      plan: the shapes and their costs.
      padding: the fraction of an epoch's positions that are padding.
      steps_per_epoch: the number of batches per epoch.
      epoch_seconds: the predicted time of one epoch in seconds.
      compile_seconds: the time to compile all shapes of the plan in seconds.
      total_seconds: the time to compile the shapes and to run all epochs in seconds.
    """

    plan: BucketPlan
    padding: float
    steps_per_epoch: int
    epoch_seconds: float
    compile_seconds: float
    total_seconds: float

    @property
    def num_buckets(self) -> int:
        """The number of shapes of the plan."""
        return len(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "num_buckets": self.num_buckets,
            **numbers,
            "plan": json.loads(self.plan.to_json()),
        }


@dataclasses.dataclass(frozen=True)
class PlanCurve(Record):
    """The best plans with 1, 2, ... buckets, and the one with the least total time.

    Attributes:
      points: the plans, by increasing number of buckets and decreasing epoch time.
      num_epochs: the number of epochs that use the shapes.
      max_buckets: the largest number of buckets that was tried.
      turned: whether it is proven that more buckets cannot reduce the total time.
      exact: whether each plan is proven to be the best with its number of buckets.
    """

    points: tuple[CurvePoint, ...]
    num_epochs: float
    max_buckets: int
    turned: bool
    exact: bool

    @property
    def chosen(self) -> CurvePoint:
        """The point with the least total time."""
        return min(self.points, key=lambda point: point.total_seconds)

    @property
    def reason(self) -> str:
        """An explanation of the choice, as text for the user."""
        chosen = self.chosen
        place = self.points.index(chosen)
        compiling, epoch, total = (
            format_cost(seconds, SECONDS)
            for seconds in (
                chosen.compile_seconds,
                chosen.epoch_seconds,
                chosen.total_seconds,
            )
        )
        epochs = f"{self.num_epochs:g} epochs take {epoch} each"
        if self.num_epochs == 1:
            epochs = f"1 epoch takes {epoch}"
        text = (
            f"With {count_shapes(chosen.num_buckets)}, compiling takes {compiling} and "
            f"{epochs}, {total} in total"
        )
        near = slice(max(place - 1, 0), place + 2)
        neighbors = [point for point in self.points[near] if point is not chosen]
        if neighbors:
            totals = [
                f"{count_shapes(x.num_buckets)} would take "
                f"{format_cost(x.total_seconds, SECONDS)}"
                for x in neighbors
            ]
            text += f"; {' and '.join(totals)}"
        text += "."
        if not self.exact:
            text += " Some plans are not proven to be optimal."
        if not self.turned:
            text += f" More than {self.max_buckets} shapes were not tried."
        return text

    def __len__(self) -> int:
        return len(self.points)

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "num_epochs": self.num_epochs,
            "max_buckets": self.max_buckets,
            "turned": self.turned,
            "exact": self.exact,
            "chosen": self.points.index(self.chosen),
            "chosen_num_buckets": self.chosen.num_buckets,
            "reason": self.reason,
            "points": [point.to_dict() for point in self.points],
        }

    def __rich__(self) -> Any:
        """Returns the curve as a `rich` table for a terminal."""
        table = number_table(
            ("", "shapes", "padding", "steps", "epoch s", "compile s", "total s"),
            (
                (
                    "->" if point is self.chosen else "",
                    str(point.num_buckets),
                    f"{point.padding:.1%}",
                    f"{point.steps_per_epoch:,}",
                    f"{point.epoch_seconds:,.1f}",
                    f"{point.compile_seconds:,.1f}",
                    f"{point.total_seconds:,.1f}",
                )
                for point in self.points
            ),
            self.reason,
        )
        table.rows[self.points.index(self.chosen)].style = "bold"
        return table


@bar_if_slow("Planning buckets")
def plan_curve(
    lengths: Lengths,
    limits: Limits,
    *,
    compile_seconds: float,
    num_epochs: float = 1,
    max_buckets: int = 32,
) -> PlanCurve:
    """Returns the best plans with 1, 2, ... buckets, and the total time of each.

    Above 64 buckets, the number grows by about 3% from one point to the next. The curve
    ends shortly after the best number of buckets, once a lower bound, the time of full
    batches, proves that no larger number up to `max_buckets` can be better.

    If examples have several sequences, each plan is that of `plan_buckets`. Then the
    numbers are 1, 2, 3, 4, 6, 8, 12, ... until more cost more, and some around the
    best of these.

    Example: compiling a shape takes as long as 25 steps, and pays off after a few
    epochs.
      >>> import numpy as np
      >>> from jaxbucket.plan.costs import TokenCost
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=500)
      >>> cost = TokenCost(tokens_per_second=1e5)
      >>> limits = Limits(max_tokens=4096, seq_len_multiple=8, cost_fn=cost)
      >>> for epochs in (1, 10, 100):
      ...     curve = plan_curve(lengths, limits, compile_seconds=1, num_epochs=epochs)
      ...     print(curve.chosen.num_buckets, round(curve.chosen.total_seconds, 1))
      1 3.5
      3 20.3
      11 152.6

    Args:
      lengths: `[N]` integers, one per example; or sequence name -> `[N]` integers.
      limits: the limits on every shape. `limits.cost_fn` must return seconds.
      compile_seconds: the time to compile one shape in seconds, as
        `compile_steps(...).seconds` reports it.
      num_epochs: the number of epochs that use the shapes.
      max_buckets: the largest number of buckets to try.

    Raises:
      ValueError: if the lengths are empty, not positive integers, or too long for the
        limits; if `compile_seconds`, `num_epochs` or `max_buckets` is not positive; if
        the cost function does not return seconds.
    """
    limits = limits.of(lengths)
    _check_seconds(limits)
    compile_seconds = check_float("compile_seconds", compile_seconds)
    num_epochs = check_float("num_epochs", num_epochs)
    max_buckets = check_positive("max_buckets", max_buckets)
    numbers = (compile_seconds, num_epochs, max_buckets)
    if isinstance(lengths, Mapping):
        return _sequence_curve(lengths, limits, *numbers)
    return _curve(check_lengths(lengths), limits, *numbers)


def _curve(
    lengths: np.ndarray,
    limits: Limits,
    compile_seconds: float,
    num_epochs: float,
    max_buckets: int,
) -> PlanCurve:
    """Returns the curve for examples with one length."""
    candidates = Candidates.of(lengths, limits)
    real = int(candidates.tokens[-1])
    max_buckets = min(max_buckets, len(candidates))
    optimum = Optimum(candidates, max_buckets)
    # Lower bounds of the total time with 1, 2, ... buckets.
    bounds = [
        size * compile_seconds + num_epochs * optimum.full_batch_cost(size)
        for size in range(1, max_buckets + 1)
    ]
    points: list[CurvePoint] = []
    chosen: np.ndarray | None = None
    exact = True
    for size in _sizes(max_buckets):
        chosen = optimum.choice(size, chosen)
        exact &= optimum.exact
        if len(chosen) < size:
            # Another bucket would save nothing, even if compiling were free.
            continue
        counts = candidates.counts(chosen)
        plan = limits.plan(candidates.seq_lens[chosen], counts)
        points.append(
            _point(plan, counts, real, limits.accumulate, compile_seconds, num_epochs)
        )
        best = min(points, key=lambda point: point.total_seconds)
        if size >= best.num_buckets + _POINTS_BEYOND and all(
            bound >= best.total_seconds for bound in bounds[size:]
        ):
            break
    best = min(point.total_seconds for point in points)
    # The bounds are convex: each shape saves at most as much as the previous one. Once
    # they rise, they never fall again.
    rises = len(bounds) > 1 and bounds[-1] >= max(bounds[-2], best)
    turned = max_buckets == len(candidates) or rises
    return PlanCurve(tuple(points), num_epochs, max_buckets, turned, exact)


def _sequence_curve(
    lengths: Mapping[str, ArrayLike],
    limits: Limits,
    compile_seconds: float,
    num_epochs: float,
    max_buckets: int,
) -> PlanCurve:
    """Returns the curve for examples with several sequences."""
    points: dict[int, CurvePoint] = {}
    matrix = lengths_matrix(lengths, limits.sequences)
    real = int(limits.planned_lengths(matrix).sum())
    numbers = (limits.accumulate, compile_seconds, num_epochs)

    def add(size: int) -> None:
        plan = plan_sequences(lengths, limits, size)
        points[size] = _point(plan, example_counts(plan, matrix), real, *numbers)

    def best() -> int:
        return min(points, key=lambda size: points[size].total_seconds)

    for size in _few_sizes(max_buckets):
        add(size)
        # Two more buckets cost more, or another one would save nothing.
        if best() not in list(points)[-3:] or len(points[size].plan) < size:
            break
    while middles := _middles(sorted(points), best()):
        for size in middles:
            add(size)
    cheaper: list[CurvePoint] = []
    for _, point in sorted(points.items()):
        # The search is not exact, so more buckets may cost more.
        if not cheaper or point.epoch_seconds < cheaper[-1].epoch_seconds:
            cheaper.append(point)
    return PlanCurve(tuple(cheaper), num_epochs, max(points), turned=False, exact=False)


def _middles(sizes: list[int], best: int) -> list[int]:
    """Returns the numbers between one number and its neighbors, if these are far."""
    place = sizes.index(best)
    near = sizes[max(place - 1, 0) : place + 2]
    pairs = itertools.pairwise(near)
    return [(a + b) // 2 for a, b in pairs if b > a + max(1, a // _FEW_PER_DOUBLING)]


def _few_sizes(max_buckets: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, ... up to and with a largest number of buckets."""
    sizes = [1, *(x for n in range(1, 31) for x in (1 << n, 3 << (n - 1)))]
    return [size for size in sizes if size < max_buckets] + [max_buckets]


def _sizes(max_buckets: int) -> list[int]:
    """Returns the numbers of buckets to try: not all of the large ones."""
    sizes = [1]
    while sizes[-1] < max_buckets:
        increase = max(1, sizes[-1] // _SIZES_PER_DOUBLING)
        sizes.append(min(sizes[-1] + increase, max_buckets))
    return sizes


def _point(
    plan: BucketPlan,
    counts: np.ndarray,
    real_tokens: int,
    accumulate: int,
    compile_seconds: float,
    num_epochs: float,
) -> CurvePoint:
    """Returns the point of a plan, from the number of examples of each bucket."""
    flow = epoch_flow(plan, counts, "cheapest", accumulate)
    batches = flow.batches * accumulate
    padded = epoch_cost(batches, plan.batch_sizes * plan.tokens_per_row)
    epoch = float(epoch_cost(batches, plan.costs))
    compiling = compile_seconds * len(plan)
    return CurvePoint(
        plan=plan,
        padding=1 - real_tokens / padded,
        steps_per_epoch=flow.num_batches,
        epoch_seconds=epoch,
        compile_seconds=compiling,
        total_seconds=compiling + num_epochs * epoch,
    )


def _check_seconds(limits: Limits) -> None:
    """Raises a ValueError if the unit of the cost function is known and not seconds."""
    unit = "tokens" if limits.cost_fn is None else unit_of(limits.cost_fn)
    if unit not in (SECONDS, "cost"):
        raise ValueError(
            f"`cost_fn={limits.cost_fn}` counts {unit}, but compile time is measured "
            "in seconds. Use `jb.plan.StepTime.fit(...)` with measured step times, or "
            "`jb.plan.TokenCost(tokens_per_second=...)`. On the command line, use "
            "`--step-times` or `--per-second`."
        )
