"""A comparison of the plans that different rules for boundaries choose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.plan.formatting import (
    count_shapes,
    format_cost,
    format_number,
    number_table,
)
from jaxbucket.plan.limits import Limits, costed
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.planner import RULES
from jaxbucket.plan.remainder import Remainder
from jaxbucket.plan.reports.epoch import Report, report

OPTIMAL = "optimal"
BY_TOKENS = "optimal by tokens"
ONE_SHAPE = "one shape"
# As wide as the longest name of a rule.
_NAME_WIDTH = len(BY_TOKENS)


@dataclasses.dataclass(frozen=True)
class ComparedPlan:
    """A plan and its epoch.

    Attributes:
      name: the name of the rule that chose the shapes, or of one of the `others`.
      plan: the shapes.
      report: one epoch of the plan.
    """

    name: str
    plan: BucketPlan
    report: Report

    @property
    def is_packed(self) -> bool:
        """Whether its rows hold several examples."""
        return self.report.packed_examples > 0

    @property
    def largest_batch(self) -> int:
        """The largest B * T."""
        return max(bucket.num_tokens for bucket in self.plan.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Returns every number, as plain Python."""
        return {
            "name": self.name,
            "packed": self.is_packed,
            "shapes": len(self.plan),
            "largest_batch": self.largest_batch,
            "largest_batch_size": int(self.plan.batch_sizes.max()),
            "plan": json.loads(self.plan.to_json()),
            "report": self.report.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Plans of the same lengths, the cheapest epoch first.

    Plans that drop or truncate different examples than the rules' plans come last,
    because their cost is that of other data.

    Attributes:
      plans: the plans, each with its epoch.
      least_cost: a lower bound, the cost of an epoch of full batches: within these
        limits no plan of at most `num_buckets` shapes costs less, one example per row.
      num_buckets: the most shapes that a rule's plan may have.
      exact: whether the optimal plan is proven to be the cheapest plan of at most
        `num_buckets` shapes, remainders included; False if the search ended early.
      note: sentences about the compared plans, printed below the table.
    """

    plans: tuple[ComparedPlan, ...]
    least_cost: float
    num_buckets: int
    exact: bool
    note: str = ""

    def __getitem__(self, name: str) -> ComparedPlan:
        return {compared.name: compared for compared in self.plans}[name]

    @property
    def unit(self) -> str:
        """The name of a token in tables and pictures."""
        return self.plans[0].report.unit

    def extended(self, plans: Iterable[ComparedPlan], note: str = "") -> Comparison:
        """Returns the comparison with more plans, such as packed rows, in their places.

        Args:
          plans: plans of the same lengths, costed alike, with names that are not taken.
          note: sentences about them.

        Raises:
          ValueError: if two plans have the same name.
        """
        plans = (*self.plans, *plans)
        names = [compared.name for compared in plans]
        if len(set(names)) < len(names):
            raise ValueError(f"`plans` have equal names: {names}. Rename one of them.")
        ordered = _by_cost(plans, self[OPTIMAL].report.real_tokens)
        return dataclasses.replace(self, plans=ordered, note=note)

    def with_unit(self, unit: str) -> Comparison:
        """Returns the comparison with another name for a token, such as "bytes"."""
        plans = (
            dataclasses.replace(x, report=dataclasses.replace(x.report, unit=unit))
            for x in self.plans
        )
        return dataclasses.replace(self, plans=tuple(plans))

    def is_of_other_data(self, compared: ComparedPlan) -> bool:
        """Returns whether a plan keeps different tokens than the rules' plans."""
        return compared.report.real_tokens != self[OPTIMAL].report.real_tokens

    @property
    def summary(self) -> str:
        """The distance of the best plan from the lower bound, and notes, as text."""
        tokens = self[OPTIMAL].report.real_tokens
        sentences = [
            self._of_optimal,
            *(
                f"{one.name} keeps {one.report.real_tokens:,} {self.unit}, not "
                f"{tokens:,}: its cost is of other data."
                for one in self.plans
                if self.is_of_other_data(one)
            ),
            self.note,
        ]
        return "\n".join(filter(None, sentences))

    @property
    def _of_optimal(self) -> str:
        best = self[OPTIMAL].report
        above = best.epoch_cost / self.least_cost - 1
        least = format_cost(self.least_cost, best.cost_unit, self.unit)
        proof = " No such plan costs less than optimal (proven)." if self.exact else ""
        return (
            f"With one example per row, {count_shapes(self.num_buckets)} cost at least "
            f"{least}; optimal is {above:.2%} above that.{proof}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns every number, as plain Python."""
        return {
            "num_buckets": self.num_buckets,
            "exact": self.exact,
            "least_cost": self.least_cost,
            "cost_unit": self.plans[0].report.cost_unit,
            "unit": self.unit,
            "note": self.note,
            "plans": [compared.to_dict() for compared in self.plans],
        }

    def to_json(self) -> str:
        """Returns every number, as one JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """Returns the plans as a `rich` table, for a terminal."""
        best = self.plans[0].report
        unit = self.unit if best.cost_unit == "tokens" else best.cost_unit
        names = (
            *("plan", "shapes", "padding", "empty\nrows", "steps", "largest\nbatch"),
            *(f"epoch\n({unit})", "times\nbest"),
        )
        legend = (
            "Padding: share of all positions. Empty rows: its part in rows without an "
            "example. Largest batch: its B * T. Times best: relative to the first "
            "plan."
        )
        rows = map(self._row, self.plans)
        table = number_table(names, rows, f"{self.summary}\n{legend}")
        first = table.columns[0]
        # Long names continue on the next line: no letter of a file's name is lost.
        first.justify, first.no_wrap, first.overflow = "left", False, "fold"
        first.max_width = _NAME_WIDTH
        return table

    def _row(self, compared: ComparedPlan) -> tuple[str, ...]:
        epoch, best = compared.report, self.plans[0].report
        over = f"{epoch.epoch_cost / best.epoch_cost:.2f}x"
        return (
            compared.name,
            str(len(compared.plan)),
            f"{epoch.padding:.1%}",
            f"{epoch.padding_in_empty_rows:.1%}",
            f"{epoch.steps_per_epoch:,}",
            f"{compared.largest_batch:,}",
            format_number(epoch.epoch_cost, epoch.cost_unit),
            "-" if self.is_of_other_data(compared) else over,
        )


def _by_cost(
    plans: Sequence[ComparedPlan], real_tokens: int
) -> tuple[ComparedPlan, ...]:
    """Sorts plans by the cost of an epoch; those that keep other tokens come last.

    The sort is stable, so that plans with the same cost keep their order.
    """
    return tuple(
        sorted(
            plans,
            key=lambda one: (
                one.report.real_tokens != real_tokens,
                one.report.epoch_cost,
            ),
        )
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
    """Returns the plans of every rule and your own with their epochs, cheapest first.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> comparison = compare_plans(lengths, Limits(max_tokens=4096), num_buckets=4)
      >>> comparison.plans[0].name, comparison.plans[-1].name
      ('optimal', 'one shape')

    Args:
      lengths: `[N]` integers, one per example.
      limits: the limits of every shape. If they have a `cost_fn`, the plan that is
        optimal by tokens is compared too.
      num_buckets: the most shapes of a plan.
      others: name -> a plan to compare with, such as `BucketPlan.from_shapes(...)`.
      remainder: what happens to examples that fill no batch: "cheapest" moves them to
        longer buckets if that costs less, "promote" always moves them, and "pad" leaves
        them in batches with empty rows.

    Raises:
      ValueError: for lengths that are empty, not integers, not positive, or too long
        for the limits or for one of the `others`; for a name in `others` that a rule
        has; for `remainder="drop"`, under which each plan trains on other examples.
    """
    lengths = check_lengths(lengths)
    if remainder == "drop":
        raise ValueError(
            "`remainder='drop'` leaves out different examples in every plan, so that "
            "their epochs cannot be compared. Choose a different one, or call `report` "
            "for each plan."
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
            raise ValueError(
                f"`others` has a plan {name!r}, which is the name of a rule. Rename it."
            )
        plans[name] = costed(plan, limits.cost_fn)
    options: Any = {"remainder": remainder, "accumulate": limits.accumulate}
    compared = [
        ComparedPlan(name, plan, report(plan, lengths, **options))
        for name, plan in plans.items()
    ]
    return Comparison(
        _by_cost(compared, compared[0].report.real_tokens),
        # A rounding error must not lift the bound above the best plan.
        min(optimum.steady_cost(num_buckets), candidates.epoch_cost(chosen[OPTIMAL])),
        num_buckets,
        optimum.exact and remainder == "cheapest",
    )
