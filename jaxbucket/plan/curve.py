"""The best number of buckets: compile time against the epoch time that it saves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_number, check_positive
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.base.table import table_text
from jaxbucket.plan.boundary_rules import Candidates
from jaxbucket.plan.costs import SECONDS, unit_of
from jaxbucket.plan.flow.remainder import epoch_cost
from jaxbucket.plan.formatting import count_shapes, format_cost, number_table
from jaxbucket.plan.limits import Limits, check_limits
from jaxbucket.plan.optimal import Optimum

# How many numbers of buckets are tried per doubling. Up to twice this number, all are.
_SIZES_PER_DOUBLING = 32
# The number of points after the best one, so that plots show the minimum.
_POINTS_BEYOND = 4
# The number of shapes hardly matters while the total time is at most this much longer.
_NEARLY = 0.02


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
class PlanCurve:
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
        index = self.points.index(chosen)
        neighbors = (
            self.points[max(index - 1, 0) : index] + self.points[index + 1 :][:1]
        )
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
        if neighbors:
            totals = [
                f"{count_shapes(x.num_buckets)} would take "
                f"{format_cost(x.total_seconds, SECONDS)}"
                for x in neighbors
            ]
            text += f"; {' and '.join(totals)}"
        text += f".{self._nearly_best}"
        if not self.exact:
            text += " Some plans are not proven to be optimal."
        if not self.turned:
            text += f" More than {self.max_buckets} shapes were not tried."
        elif (last := self.points[-1].num_buckets) < self.max_buckets:
            text += (
                f" The curve stops at {count_shapes(last)}, because more shapes are "
                "proven not to take less time."
            )
        return text

    @property
    def _nearly_best(self) -> str:
        """A sentence about numbers of shapes whose total time is hardly longer."""
        limit = (1 + _NEARLY) * self.chosen.total_seconds
        first = last = self.points.index(self.chosen)
        while first > 0 and self.points[first - 1].total_seconds <= limit:
            first -= 1
        while last + 1 < len(self) and self.points[last + 1].total_seconds <= limit:
            last += 1
        if first == last:
            return ""
        fewest, most = (self.points[x].num_buckets for x in (first, last))
        through = "and" if last == first + 1 else "to"
        return (
            f" {fewest} {through} {most} shapes are within {_NEARLY:.0%} of this time."
        )

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

    def to_json(self) -> str:
        """Returns all numbers as one JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """Returns the table of `jaxbucket plan --num-buckets auto`, as text."""
        return table_text(self)

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
    lengths: ArrayLike,
    limits: Limits,
    *,
    compile_seconds: float | None,
    num_epochs: float = 1,
    max_buckets: int = 32,
) -> PlanCurve:
    """Returns the best plans with 1, 2, ... buckets, and the total time of each.

    Above 64 buckets, the number grows by about 3% from one point to the next. The curve
    ends shortly after the best number of buckets, once a lower bound, the time of full
    batches, proves that no larger number up to `max_buckets` can be better.

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
      11 154.2

    Args:
      lengths: `[N]` integers, one per example.
      limits: the limits on every shape. `limits.cost_fn` must return seconds.
      compile_seconds: the time to compile one shape in seconds.
      num_epochs: the number of epochs that use the shapes.
      max_buckets: the largest number of buckets to try.

    Raises:
      ValueError: if the lengths are empty, not positive integers, or too long for the
        limits; if `compile_seconds`, `num_epochs` or `max_buckets` is not positive; if
        the cost function does not return seconds.
    """
    check_limits(limits)
    _check_seconds(limits)
    if compile_seconds is None:
        raise ValueError(
            "`compile_seconds` is missing. Pass the time to compile one shape; "
            "`compile_steps(...).seconds` reports it."
        )
    compile_seconds = check_number("compile_seconds", compile_seconds)
    num_epochs = check_number("num_epochs", num_epochs)
    candidates = limits.candidates(check_lengths(lengths))
    max_buckets = min(check_positive("max_buckets", max_buckets), len(candidates))
    optimum = Optimum(candidates, max_buckets)
    # Lower bounds of the total time with 1, 2, ... buckets.
    bounds = [
        size * compile_seconds + num_epochs * optimum.steady_cost(size)
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
        points.append(_point(candidates, chosen, limits, compile_seconds, num_epochs))
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


def _sizes(max_buckets: int) -> list[int]:
    """Returns the numbers of buckets to try: not all of the large ones."""
    sizes = [1]
    while sizes[-1] < max_buckets:
        increase = max(1, sizes[-1] // _SIZES_PER_DOUBLING)
        sizes.append(min(sizes[-1] + increase, max_buckets))
    return sizes


def _point(
    candidates: Candidates,
    chosen: np.ndarray,
    limits: Limits,
    compile_seconds: float,
    num_epochs: float,
) -> CurvePoint:
    flow = candidates.flow(chosen)
    tokens = candidates.batch_sizes[chosen] * candidates.seq_lens[chosen]
    padded = epoch_cost(flow.batches, tokens)
    epoch = candidates.epoch_cost(chosen)
    return CurvePoint(
        plan=limits.plan(candidates.seq_lens[chosen]),
        padding=1 - int(candidates.tokens[-1]) / padded,
        steps_per_epoch=flow.num_batches,
        epoch_seconds=epoch,
        compile_seconds=compile_seconds * len(chosen),
        total_seconds=compile_seconds * len(chosen) + num_epochs * epoch,
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
