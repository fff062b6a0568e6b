"""Plans of the same lengths by every rule for boundaries, side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.plan.formatting import in_unit, number_in_unit, number_table
from jaxbucket.plan.limits import Limits, costed
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.planner import RULES
from jaxbucket.plan.remainder import Remainder
from jaxbucket.plan.reports.epoch import Report, report

OPTIMAL = "optimal"
BY_TOKENS = "optimal by tokens"
ONE_SHAPE = "one shape"


@dataclasses.dataclass(frozen=True)
class ComparedPlan:
    """A plan and its epoch.

    Attributes:
      name: of the rule that chose the shapes, or of one of the `others`.
      plan: the shapes.
      report: one epoch of the plan.
    """

    name: str
    plan: BucketPlan
    report: Report

    @property
    def largest_batch(self) -> int:
        """The largest B * T."""
        return max(bucket.num_tokens for bucket in self.plan.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "name": self.name,
            "shapes": len(self.plan),
            "largest_batch": self.largest_batch,
            "largest_batch_size": int(self.plan.batch_sizes.max()),
            "plan": json.loads(self.plan.to_json()),
            "report": self.report.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Plans of the same lengths, the cheapest epoch first.

    Plans that drop or cut other examples than the rules' plans come last: what they
    cost is of other data.

    Attributes:
      plans: each with its epoch.
      least_cost: a lower bound, the cost of an epoch of full batches: no choice of so
        many shapes costs less under these limits.
      num_buckets: the most shapes that a rule's plan may have.
      exact: whether the optimal plan is proven to be the cheapest of so many shapes,
        remainders included; False where the search ended before that.
    """

    plans: tuple[ComparedPlan, ...]
    least_cost: float
    num_buckets: int
    exact: bool

    def __getitem__(self, name: str) -> ComparedPlan:
        return {compared.name: compared for compared in self.plans}[name]

    def is_of_other_data(self, compared: ComparedPlan) -> bool:
        """Whether a plan keeps other tokens than those of the rules."""
        return compared.report.real_tokens != self[OPTIMAL].report.real_tokens

    @property
    def summary(self) -> str:
        """How near the best plan is to the lower bound, in sentences."""
        tokens = self[OPTIMAL].report.real_tokens
        return self._of_optimal + "".join(
            f" {one.name} keeps {one.report.real_tokens:,} tokens, not {tokens:,}: its "
            "cost is of other data."
            for one in self.plans
            if self.is_of_other_data(one)
        )

    @property
    def _of_optimal(self) -> str:
        best = self[OPTIMAL].report
        above = best.epoch_cost / self.least_cost - 1
        proof = " Proven: so many shapes within these limits cost no less."
        return (
            f"Full batches of {self.num_buckets} shapes would cost "
            f"{in_unit(self.least_cost, best.cost_unit)} at least; optimal is "
            f"{above:.2%} above that.{proof if self.exact else ''}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "num_buckets": self.num_buckets,
            "exact": self.exact,
            "least_cost": self.least_cost,
            "cost_unit": self.plans[0].report.cost_unit,
            "plans": [compared.to_dict() for compared in self.plans],
        }

    def to_json(self) -> str:
        """Every number, as one JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """The plans as a `rich` table, for a terminal."""
        best = self.plans[0].report
        names = (
            *("boundaries", "shapes", "padding", "in rows", "empty\nrows", "steps"),
            *("largest\nbatch", f"epoch\n{best.cost_unit}", "over\nbest"),
        )
        table = number_table(names, map(self._row, self.plans), self.summary)
        for column in table.columns:
            column.no_wrap = True
        table.columns[0].justify, table.columns[0].max_width = "left", 18
        return table

    def _row(self, compared: ComparedPlan) -> tuple[str, ...]:
        epoch, best = compared.report, self.plans[0].report
        over = f"{epoch.epoch_cost / best.epoch_cost:.2f}x"
        return (
            compared.name,
            str(len(compared.plan)),
            f"{epoch.padding:.1%}",
            f"{epoch.padding_in_rows:.1%}",
            f"{epoch.padding_in_empty_rows:.1%}",
            f"{epoch.steps_per_epoch:,}",
            f"{compared.largest_batch:,}",
            number_in_unit(epoch.epoch_cost, epoch.cost_unit),
            "-" if self.is_of_other_data(compared) else over,
        )


@bar_if_slow("Comparing plans")
def compare_plans(
    lengths: ArrayLike,
    limits: Limits,
    *,
    num_buckets: int = 8,
    others: Mapping[str, BucketPlan] | None = None,
    remainder: Remainder = "cheapest",
) -> Comparison:
    """Returns the epochs of every rule's plan and of your own, the cheapest first.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> comparison = compare_plans(lengths, Limits(max_tokens=4096), num_buckets=4)
      >>> comparison.plans[0].name, comparison.plans[-1].name
      ('optimal', 'one shape')

    Args:
      lengths: `[N]` integers, one per example.
      limits: of every shape. Where it has a `cost_fn`, the plan that is optimal by
        tokens is compared, too.
      num_buckets: the most shapes of a plan.
      others: name -> a plan to compare with, such as `BucketPlan.from_shapes(...)`.
      remainder: what becomes of examples that fill no batch: "cheapest" moves them to
        longer buckets where that costs less, "promote" always, "pad" never.

    Raises:
      ValueError: for lengths that are empty, not integers, not positive, or too long
        for the limits or for one of the `others`; for a name of `others` that a rule
        has; for `remainder="drop"`, which trains on other examples under each plan.
    """
    lengths = check_lengths(lengths)
    if remainder == "drop":
        raise ValueError(
            "`remainder='drop'` leaves out other examples in every plan, so that their "
            "epochs cannot be compared. Choose another, or ask `report` of each plan."
        )
    candidates = limits.candidates(lengths)
    num_buckets = min(check_positive("num_buckets", num_buckets), len(candidates))
    optimum = Optimum(candidates, num_buckets)
    chosen = {OPTIMAL: optimum.choice(num_buckets)}
    if limits.cost_fn is not None:
        by_tokens = dataclasses.replace(limits, cost_fn=None).candidates(lengths)
        chosen[BY_TOKENS] = RULES[OPTIMAL](by_tokens, num_buckets)
    for name, rule in RULES.items():
        if name != OPTIMAL:
            chosen[name.replace("_", " ")] = rule(candidates, num_buckets)
    chosen[ONE_SHAPE] = RULES["quantile"](candidates, 1)
    plans = {
        name: limits.plan(candidates.seq_lens[ends]) for name, ends in chosen.items()
    }
    for name, plan in (others or {}).items():
        if name in plans:
            raise ValueError(f"`others` has {name!r}, which is a rule's: rename it.")
        plans[name] = costed(plan, limits.cost_fn)
    options: Any = {"remainder": remainder, "accumulate": limits.accumulate}
    compared = [
        ComparedPlan(name, plan, report(plan, lengths, **options))
        for name, plan in plans.items()
    ]
    tokens = compared[0].report.real_tokens
    # Stable: of two that cost the same the one that is named first.
    compared.sort(
        key=lambda one: (one.report.real_tokens != tokens, one.report.epoch_cost)
    )
    return Comparison(
        tuple(compared),
        # A rounding error must not lift the bound above the best plan.
        min(optimum.steady_cost(num_buckets), candidates.epoch_cost(chosen[OPTIMAL])),
        num_buckets,
        optimum.exact and remainder == "cheapest",
    )
