"""How many buckets: what each more costs to compile, against what it saves an epoch."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_number, check_positive
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.plan.costs import SECONDS, unit_of
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.remainder import epoch_cost
from jaxbucket.plan.rules import Candidates

# Up to twice so many every number is looked at, and of more these parts of a doubling.
_STEPS = 32
# How many more than the chosen are shown, so that one sees the curve turn.
_SHOWN_BEYOND = 4


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The best plan of a number of buckets.

    Attributes:
      plan: its shapes.
      padding: share of an epoch's positions that are padding.
      steps_per_epoch: batches of an epoch.
      epoch_seconds: predicted, of one epoch's steps.
      compile_seconds: of all its shapes.
      total_seconds: of compiling and of all epochs.
    """

    plan: BucketPlan
    padding: float
    steps_per_epoch: int
    epoch_seconds: float
    compile_seconds: float
    total_seconds: float

    @property
    def num_buckets(self) -> int:
        """Shapes of the plan."""
        return len(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "num_buckets": self.num_buckets,
            **numbers,
            "plan": json.loads(self.plan.to_json()),
        }


@dataclasses.dataclass(frozen=True)
class PlanCurve:
    """The best plans of 1, 2, ... buckets, and which of them takes the least time.

    Attributes:
      points: by number of buckets; each takes less time for an epoch than the last.
      num_epochs: for which the shapes are used.
      max_buckets: shapes that were looked at, at most.
      turned: whether no more shapes could take less time; else they were not looked at.
      exact: whether each plan is proven to be the best of so many buckets.
    """

    points: tuple[CurvePoint, ...]
    num_epochs: float
    max_buckets: int
    turned: bool
    exact: bool

    @property
    def chosen(self) -> CurvePoint:
        """The one that takes the least time in all."""
        return min(self.points, key=lambda point: point.total_seconds)

    @property
    def reason(self) -> str:
        """Why it is chosen, in a sentence."""
        chosen = self.chosen
        place = self.points.index(chosen)
        others = [self.points[i] for i in (place - 1, place + 1) if 0 <= i < len(self)]
        than = ", ".join(
            f"{p.num_buckets} would take {p.total_seconds:,.1f} s" for p in others
        )
        shapes = (
            "1 shape" if chosen.num_buckets == 1 else f"{chosen.num_buckets} shapes"
        )
        epochs = "1 epoch" if self.num_epochs == 1 else f"{self.num_epochs:g} epochs"
        text = (
            f"{shapes}: {chosen.compile_seconds:,.1f} s to compile "
            f"and {epochs} of {chosen.epoch_seconds:,.1f} s make "
            f"{chosen.total_seconds:,.1f} s"
        )
        text = f"{text}; {than}." if than else f"{text}."
        if not self.exact:
            text += " Not all plans are proven to be the best of as many shapes."
        if not self.turned:
            text += f" More than {self.max_buckets} shapes were not looked at."
        return text

    def __len__(self) -> int:
        return len(self.points)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "num_epochs": self.num_epochs,
            "max_buckets": self.max_buckets,
            "turned": self.turned,
            "exact": self.exact,
            "chosen": self.points.index(self.chosen),
            "reason": self.reason,
            "points": [point.to_dict() for point in self.points],
        }

    def to_json(self) -> str:
        """Every number, as one JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """The curve as a `rich` table, for a terminal."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, caption=self.reason, caption_justify="left")
        for name in ("", "shapes", "padding", "steps", "epoch s", "compile s", "all s"):
            table.add_column(name, justify="right")
        for point in self.points:
            table.add_row(
                "->" if point is self.chosen else "",
                str(point.num_buckets),
                f"{point.padding:.1%}",
                f"{point.steps_per_epoch:,}",
                f"{point.epoch_seconds:,.1f}",
                f"{point.compile_seconds:,.1f}",
                f"{point.total_seconds:,.1f}",
                style="bold" if point is self.chosen else None,
            )
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
    """Returns the best plans of 1, 2, ... buckets, and what each takes in all.

    Of more than 64 it looks at some: each number is about 3% above the last.
    It goes on for a little beyond the best number, and to where no number up to
    `max_buckets` can be better: each plan's time is at least that of full batches.

    Example: compiling a shape takes as long as 30 steps, and pays after a few epochs.
      >>> import numpy as np
      >>> from jaxbucket.plan.costs import TokenCost
      >>> lengths = np.random.default_rng(0).lognormal(5, 1, 5000).clip(1, 2000)
      >>> limits = Limits(max_tokens=16_384, cost_fn=TokenCost(tokens_per_second=1e5))
      >>> for num_epochs in (1, 10, 100):
      ...     curve = plan_curve(
      ...         lengths.astype(int), limits, compile_seconds=5, num_epochs=num_epochs
      ...     )
      ...     print(curve.chosen.num_buckets, round(curve.chosen.total_seconds))
      3 38
      8 192
      23 1413

    Args:
      lengths: `[N]` integers, one per example.
      limits: what every shape keeps to; its `cost_fn` counts seconds.
      compile_seconds: what compiling one shape takes.
      num_epochs: for which the shapes are used.
      max_buckets: that are looked at.

    Raises:
      ValueError: for what `plan_buckets` refuses; for a cost function that counts
        something other than seconds.
    """
    _check_seconds(limits)
    if compile_seconds is None:
        raise ValueError(
            "`compile_seconds` is missing: say what compiling one shape takes, such as "
            "`compile_steps(...).seconds` shows."
        )
    compile_seconds = check_number("compile_seconds", compile_seconds)
    num_epochs = check_number("num_epochs", num_epochs)
    candidates = limits.candidates(check_lengths(lengths))
    max_buckets = min(check_positive("max_buckets", max_buckets), len(candidates))
    optimum = Optimum(candidates, max_buckets)
    # Of no plan with so many buckets is the total less.
    least = [
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
            # None was found for which one bucket more pays, though it were for nothing.
            continue
        points.append(_point(candidates, chosen, limits, compile_seconds, num_epochs))
        best = min(points, key=lambda point: point.total_seconds)
        if size >= best.num_buckets + _SHOWN_BEYOND and all(
            bound >= best.total_seconds for bound in least[size:]
        ):
            break
    best = min(point.total_seconds for point in points)
    # What full batches save by one shape more never grows: the bounds rise from here.
    rises = len(least) > 1 and least[-1] >= max(least[-2], best)
    turned = max_buckets == len(candidates) or rises
    return PlanCurve(tuple(points), num_epochs, max_buckets, turned, exact)


def _sizes(max_buckets: int) -> list[int]:
    """The numbers of buckets that are looked at: some, where one more is little."""
    sizes = [1]
    while sizes[-1] < max_buckets:
        sizes.append(min(sizes[-1] + max(1, sizes[-1] // _STEPS), max_buckets))
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
    """A function that says nothing of its unit is taken to count seconds."""
    unit = "tokens" if limits.cost_fn is None else unit_of(limits.cost_fn)
    if unit not in (SECONDS, "cost"):
        raise ValueError(
            f"`cost_fn={limits.cost_fn}` counts {unit}, and compiling is weighed in "
            "seconds: give `StepTime.fit(...)` of measured steps, or "
            "`TokenCost(tokens_per_second=...)`; by command, `--step-times` or "
            "`--per-second`."
        )
