"""The best number of buckets: compile time against the epoch time that it saves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.table import Record
from jaxbucket.plan.costs import SECONDS
from jaxbucket.plan.formatting import count_shapes, format_cost, number_table


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
