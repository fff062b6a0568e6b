"""The best number of buckets: compile time against the epoch time that it saves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_float, check_positive
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.sizes import Counted
from jaxbucket.base.table import Record, count_shapes, format_cost, number_table
from jaxbucket.plan.costs import SECONDS, unit_of
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.planner import plan_within
from jaxbucket.plan.reports.epoch import report

# The best number is found up to an eighth of itself, and exactly below 16.
_PER_DOUBLING = 8


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The best plan with a given number of buckets.

    Attributes:
      plan: the shapes and their costs.
      padding: the fraction of an epoch's positions that are padding.
      steps_per_epoch: the number of steps per epoch.
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
        plan = json.loads(self.plan.to_json())
        return {"num_buckets": self.num_buckets, **vars(self), "plan": plan}


@dataclasses.dataclass(frozen=True)
class PlanCurve(Record):
    """The best plans with few and many buckets, and the one with the least total time.

    Attributes:
      points: the plans, by increasing number of buckets and decreasing epoch time.
      num_epochs: the number of epochs that use the shapes.
      max_buckets: the largest number of buckets to try.
    """

    points: tuple[CurvePoint, ...]
    num_epochs: float
    max_buckets: int

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
        if chosen.num_buckets == self.max_buckets:
            text += f". More than {self.max_buckets} shapes were not tried"
        return f"{text}."

    def __len__(self) -> int:
        return len(self.points)

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "num_epochs": self.num_epochs,
            "max_buckets": self.max_buckets,
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


def plan_curve(
    lengths: Counted,
    limits: Limits,
    *,
    compile_seconds: float,
    num_epochs: float = 1,
    max_buckets: int = 32,
) -> PlanCurve:
    """Returns the plans of `plan_within` with few and many buckets, and their times.

    Numbers of buckets grow by a third or a half, 1, 2, 3, 4, 6, 8, 12, ..., until the
    last two take longer than the best one. Then the numbers beside the best one are
    tried, too.

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
      lengths: `[N]` integers, one per example, or their `LengthCounts`; or sequence
        name -> `[N]` integers.
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
    unit = "tokens" if limits.cost_fn is None else unit_of(limits.cost_fn)
    if unit not in (SECONDS, "cost"):
        raise ValueError(
            f"`cost_fn={limits.cost_fn}` counts {unit}, and compiling takes seconds. "
            "Use `jb.plan.StepTime.fit(...)` or `jb.plan.TokenCost(tokens_per_second="
            "...)`; on the command line, `--step-times` or `--per-second`."
        )
    compile_seconds = check_float("compile_seconds", compile_seconds)
    num_epochs = check_float("num_epochs", num_epochs)
    max_buckets = check_positive("max_buckets", max_buckets)
    points: dict[int, CurvePoint] = {}
    if not isinstance(lengths, Mapping):
        lengths = LengthCounts.of(lengths)

    def add(size: int) -> None:
        plan = plan_within(lengths, limits, num_buckets=size)
        epoch = report(plan, lengths, accumulate=limits.accumulate)
        compiling = compile_seconds * len(plan)
        points[size] = CurvePoint(
            plan=plan,
            padding=epoch.padding,
            steps_per_epoch=epoch.steps_per_epoch,
            epoch_seconds=epoch.epoch_cost,
            compile_seconds=compiling,
            total_seconds=compiling + num_epochs * epoch.epoch_cost,
        )

    def best() -> int:
        return min(points, key=lambda size: points[size].total_seconds)

    for size in _sizes(max_buckets):
        add(size)
        # More buckets would take longer, or save nothing.
        if best() not in list(points)[-3:] or len(points[size].plan) < size:
            break
    while beside := _beside(best(), sorted(points)):
        for size in beside:
            add(size)
    faster: list[CurvePoint] = []
    for _, point in sorted(points.items()):
        # A plan may have fewer buckets, and may not be the very best with so many.
        if not faster or point.epoch_seconds < faster[-1].epoch_seconds:
            faster.append(point)
    return PlanCurve(tuple(faster), num_epochs, max_buckets)


def _sizes(max_buckets: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, ... up to and with a largest number of buckets."""
    sizes = [1, *(x for n in range(1, 31) for x in (1 << n, 3 << (n - 1)))]
    return [size for size in sizes if size < max_buckets] + [max_buckets]


def _beside(best: int, sizes: list[int]) -> list[int]:
    """Returns numbers halfway between the best one and its neighbors, if any are."""
    place = sizes.index(best)
    pairs = itertools.pairwise(sizes[max(place - 1, 0) : place + 2])
    return [(a + b) // 2 for a, b in pairs if b > a + max(1, a // _PER_DOUBLING)]
