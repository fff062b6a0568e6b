"""A comparison of the plans that different rules for boundaries choose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.sizes import Counted, check_same_sequences, lengths_matrix
from jaxbucket.base.table import (
    Record,
    count_shapes,
    format_cost,
    format_number,
    number_table,
)
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.joint_planner import fitted_plan, plan_sequences
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.nested import nested_shapes
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.planner import RULES
from jaxbucket.plan.reports.epoch import Report, report

OPTIMAL = "optimal"
BY_TOKENS = "optimal by tokens"
ONE_SHAPE = "one shape"
# As wide as the longest name of a rule.
_NAME_WIDTH = len(BY_TOKENS)
_LEGEND = (
    "Padding: the share of positions that are padding. Empty rows: the share of "
    "positions in rows without an example, included in the padding. Largest batch: the "
    "largest B * T. Times best: the cost divided by that of the first plan."
)


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

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "name": self.name,
            "packed": self.report.packed_examples > 0,
            "shapes": len(self.plan),
            "largest_batch": self.plan.largest_batch,
            "largest_batch_size": int(self.plan.batch_sizes.max()),
            "plan": json.loads(self.plan.to_json()),
            "report": self.report.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison(Record):
    """Plans of the same lengths, the cheapest epoch first.

    Plans that drop or truncate different examples than the plans of the rules come
    last, because their costs refer to different data.

    Attributes:
      plans: the plans, each with its epoch.
      least_cost: a lower bound of the cost of any plan with one example per row and at
        most `num_buckets` shapes: the cost of an epoch of full batches, or for several
        sequences None.
      num_buckets: the maximum number of shapes of a rule's plan.
      exact: whether the optimal plan is proven to be the cheapest plan of at most
        `num_buckets` shapes, remainders included; False if the search ended early.
      note: text about the compared plans, printed below the table.
    """

    plans: tuple[ComparedPlan, ...]
    least_cost: float | None
    num_buckets: int
    exact: bool
    note: str = ""

    def __post_init__(self):
        # The sort is stable, so plans with the same cost keep their order.
        plans = sorted(
            self.plans, key=lambda x: (self.is_of_other_data(x), x.report.epoch_cost)
        )
        object.__setattr__(self, "plans", tuple(plans))

    def __getitem__(self, name: str) -> ComparedPlan:
        return {compared.name: compared for compared in self.plans}[name]

    @property
    def unit(self) -> str:
        """The unit of lengths in tables and plots, such as "bytes"."""
        return self.plans[0].report.unit

    def extended(self, plans: Iterable[ComparedPlan], note: str = "") -> Comparison:
        """Returns the comparison with additional plans, sorted by cost.

        Args:
          plans: plans of the same lengths with the same cost function, and new names.
          note: text to print below the table.

        Raises:
          ValueError: if two plans have the same name.
        """
        plans = (*self.plans, *plans)
        names = [compared.name for compared in plans]
        if len(set(names)) < len(names):
            raise ValueError(
                f"`others` have the name of another plan: {names}. Rename one of them."
            )
        return dataclasses.replace(self, plans=plans, note=note)

    def with_unit(self, unit: str) -> Comparison:
        """Returns the comparison with another unit of lengths, such as "bytes"."""
        plans = (
            dataclasses.replace(x, report=dataclasses.replace(x.report, unit=unit))
            for x in self.plans
        )
        return dataclasses.replace(self, plans=tuple(plans))

    def is_of_other_data(self, compared: ComparedPlan) -> bool:
        """Returns whether a plan trains on other tokens than the plans of the rules."""
        return compared.report.real_tokens != self[OPTIMAL].report.real_tokens

    @property
    def summary(self) -> str:
        """How far the optimal plan is above the lower bound, and notes, as text."""
        tokens = self[OPTIMAL].report.real_tokens
        sentences = [
            self._optimality,
            *(
                f"{one.name} trains on {one.report.real_tokens:,} {self.unit} instead "
                f"of {tokens:,}, so its cost is not comparable."
                for one in self.plans
                if self.is_of_other_data(one)
            ),
            self.note,
        ]
        return "\n".join(filter(None, sentences))

    @property
    def _optimality(self) -> str:
        if self.least_cost is None:
            return ""
        best = self[OPTIMAL].report
        above = best.epoch_cost / self.least_cost - 1
        least = format_cost(self.least_cost, best.cost_unit, self.unit)
        kind = f"up to {count_shapes(self.num_buckets)} and one example per row"
        proof = ""
        if self.exact:
            proof = f" and is proven to be the cheapest plan with {kind}"
        return (
            f"With {kind}, an epoch costs at least {least}. This bound assumes that "
            "every batch is full, so it cannot always be reached. The optimal plan "
            f"costs {above:.2%} more{proof}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "num_buckets": self.num_buckets,
            "exact": self.exact,
            "least_cost": self.least_cost,
            "cost_unit": self.plans[0].report.cost_unit,
            "unit": self.unit,
            "note": self.note,
            "plans": [compared.to_dict() for compared in self.plans],
        }

    @property
    def legends(self) -> tuple[str, ...]:
        return (_LEGEND,)

    def __rich__(self) -> Any:
        """Returns the plans as a `rich` table, for a terminal."""
        best = self.plans[0].report
        unit = self.unit if best.cost_unit == "tokens" else best.cost_unit
        names = (
            *("plan", "shapes", "padding", "empty\nrows", "steps", "largest\nbatch"),
            *(f"epoch\n({unit})", "times\nbest"),
        )
        rows = map(self._row, self.plans)
        caption = f"{self.summary}\n{_LEGEND}"
        table = number_table(names, rows, caption, named=True)
        table.columns[0].max_width = _NAME_WIDTH
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
            f"{compared.plan.largest_batch:,}",
            format_number(epoch.epoch_cost, epoch.cost_unit),
            "-" if self.is_of_other_data(compared) else over,
        )


def compare_plans(
    lengths: Counted,
    limits: Limits,
    *,
    num_buckets: int = 8,
    others: Mapping[str, BucketPlan] | None = None,
    remainder: Remainder = "cheapest",
) -> Comparison:
    """Compares the plans of all rules with your own plans, the cheapest epoch first.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> comparison = compare_plans(lengths, Limits(max_tokens=4096), num_buckets=4)
      >>> comparison.plans[0].name, comparison.plans[-1].name
      ('optimal', 'one shape')

    If examples have several sequences, the plan of `plan_buckets` is compared with
    buckets of the longest sequence of each example, and of the sum of its sequences.

    Args:
      lengths: `[N]` integers, one per example, or their `LengthCounts`; or sequence
        name -> `[N]` integers.
      limits: the limits of every shape. If they have a `cost_fn` that is not
        proportional to tokens, the plan of one length that is optimal by tokens is
        compared too.
      num_buckets: the maximum number of shapes of each rule's plan.
      others: name -> a plan to compare with, such as `BucketPlan.from_shapes(...)`.
      remainder: what happens to examples that do not fill a batch: "cheapest" moves
        them to longer buckets if that costs less, "promote" always moves them, "pad"
        leaves them in batches with empty rows, and "repeat" costs what "cheapest" does.

    Raises:
      ValueError: if lengths are empty, not positive integers, or too long for the
        limits or for one of the `others`; if a name in `others` is the name of a rule,
        or its plan has other sequences;
        if `remainder` is "drop", because every plan would drop different examples.
    """
    if remainder == "drop":
        raise ValueError(
            "`remainder='drop'` leaves out other examples in every plan. Choose a "
            "different value, or call `report` for each plan."
        )
    num_buckets = check_positive("num_buckets", num_buckets)
    limits = limits.of(lengths)
    if isinstance(lengths, Mapping):
        plans, least_cost = _sequence_rules(lengths, limits, num_buckets), None
        exact = False
    else:
        lengths = LengthCounts.of(lengths)
        plans, least_cost, exact = _rules(lengths, limits, num_buckets)
    mine = dict(others or {})
    for name, plan in mine.items():
        asked = "the `limits` have"
        check_same_sequences("others", plan.sequences, limits.sequences, asked)
        mine[name] = limits.costed(plan)
    options: Any = {"remainder": remainder, "accumulate": limits.accumulate}
    compared = [
        ComparedPlan(name, plan, report(plan, lengths, **options))
        for name, plan in [*plans.items(), *mine.items()]
    ]
    exact = exact and remainder in ("cheapest", "repeat")
    return Comparison((), least_cost, num_buckets, exact).extended(compared)


def _rules(
    lengths: LengthCounts, limits: Limits, num_buckets: int
) -> tuple[dict[str, BucketPlan], float, bool]:
    """Returns each rule's plan, a bound of their costs, and `Optimum.exact`."""
    candidates = Candidates.of(lengths, limits)
    num_buckets = min(num_buckets, len(candidates))
    optimum = Optimum(candidates, num_buckets)
    chosen = {OPTIMAL: optimum.choice()}
    by_tokens = Candidates.of(lengths, dataclasses.replace(limits, cost_fn=None))
    ratios = candidates.costs / by_tokens.costs
    if not np.allclose(ratios, ratios[0], rtol=1e-9, atol=0):
        chosen[BY_TOKENS] = RULES[OPTIMAL](by_tokens, num_buckets)
    for name, rule in RULES.items():
        if name != OPTIMAL:
            chosen[name.replace("_", " ")] = rule(candidates, num_buckets)
    chosen[ONE_SHAPE] = RULES["quantile"](candidates, 1)
    plans = {
        name: limits.plan(candidates.seq_lens[ends], candidates.counts(ends))
        for name, ends in chosen.items()
    }
    # Without `min`, rounding errors could raise the bound above the best plan.
    cost = candidates.epoch_cost(chosen[OPTIMAL])
    least_cost = min(optimum.full_batch_cost(), cost)
    return plans, least_cost, optimum.exact


def _sequence_rules(
    lengths: Mapping[str, ArrayLike], limits: Limits, num_buckets: int
) -> dict[str, BucketPlan]:
    plans = {OPTIMAL: plan_sequences(lengths, limits, num_buckets)}
    planned = limits.planned_lengths(lengths_matrix(lengths, limits.sequences))
    for name, seq_lens in nested_shapes(planned, limits, num_buckets):
        plans[f"by the {name}"] = fitted_plan(limits, seq_lens, lengths)
    longest = limits.rounded(planned.max(axis=0))[None]
    # One shape that holds all examples may exceed the limits.
    if limits.batch_sizes(longest)[0] > 0:
        plans[ONE_SHAPE] = fitted_plan(limits, longest, lengths)
    return plans
