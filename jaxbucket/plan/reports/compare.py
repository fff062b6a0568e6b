"""Compares the plans that different rules for boundaries choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.lengths import Lengths, lengths_matrix
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.joint_planner import fitted_plan, plan_sequences
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.nested import nested_shapes
from jaxbucket.plan.optimal import Optimum
from jaxbucket.plan.planner import RULES
from jaxbucket.plan.reports.comparison import (
    BY_TOKENS,
    ONE_SHAPE,
    OPTIMAL,
    ComparedPlan,
    Comparison,
    by_cost,
)
from jaxbucket.plan.reports.epoch import report


@bar_if_slow("Comparing plans")
def compare_plans(
    lengths: Lengths,
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
      lengths: `[N]` integers, one per example; or sequence name -> `[N]` integers.
      limits: the limits of every shape. If they have a `cost_fn` that is not
        proportional to tokens, the plan of one length that is optimal by tokens is
        compared too.
      num_buckets: the maximum number of shapes of each rule's plan.
      others: name -> a plan to compare with, such as `BucketPlan.from_shapes(...)`.
      remainder: what happens to examples that do not fill a batch: "cheapest" moves
        them to longer buckets if that costs less, "promote" always moves them, and
        "pad" leaves them in batches with empty rows.

    Raises:
      ValueError: if lengths are empty, not positive integers, or too long for the
        limits or for one of the `others`; if a name in `others` is the name of a rule,
        or its plan has other sequences;
        if `remainder` is "drop", because every plan would drop different examples.
    """
    if remainder == "drop":
        raise ValueError(
            "`remainder='drop'` leaves out different examples in every plan, so "
            "their epochs cannot be compared. Choose a different value, or call "
            "`report` for each plan."
        )
    num_buckets = check_positive("num_buckets", num_buckets)
    limits = limits.of(lengths)
    if isinstance(lengths, Mapping):
        rules = _sequence_rules(lengths, limits, num_buckets)
    else:
        rules = _rules(check_lengths(lengths), limits, num_buckets)
    plans = rules.plans
    for name, plan in (others or {}).items():
        if name in plans:
            raise ValueError(
                f"`others` has a plan {name!r}, which is the name of a rule. Rename it."
            )
        plans[name] = _costed(plan, limits)
    options: Any = {"remainder": remainder, "accumulate": limits.accumulate}
    compared = [
        ComparedPlan(name, plan, report(plan, lengths, **options))
        for name, plan in plans.items()
    ]
    return Comparison(
        by_cost(compared, compared[0].report.real_tokens),
        rules.least_cost,
        rules.num_buckets,
        rules.exact and remainder == "cheapest",
    )


class _Rules(NamedTuple):
    """The plans of all rules.

    Attributes:
      plans: the name of each rule -> its plan, the optimal one first.
      least_cost: a lower bound of the cost of an epoch, with one length.
      num_buckets: the maximum number of shapes.
      exact: whether the optimal plan is proven to be the cheapest.
    """

    plans: dict[str, BucketPlan]
    least_cost: float | None
    num_buckets: int
    exact: bool


def _rules(lengths: np.ndarray, limits: Limits, num_buckets: int) -> _Rules:
    candidates = limits.candidates(lengths)
    num_buckets = min(num_buckets, len(candidates))
    optimum = Optimum(candidates, num_buckets)
    chosen = {OPTIMAL: optimum.choice(num_buckets)}
    by_tokens = dataclasses.replace(limits, cost_fn=None).candidates(lengths)
    if not _are_proportional(candidates.costs, by_tokens.costs):
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
    least_cost = min(optimum.steady_cost(num_buckets), cost)
    return _Rules(plans, least_cost, num_buckets, optimum.exact)


def _sequence_rules(
    lengths: Mapping[str, ArrayLike], limits: Limits, num_buckets: int
) -> _Rules:
    plans = {OPTIMAL: plan_sequences(lengths, limits, num_buckets)}
    planned = limits.planned_lengths(lengths_matrix(lengths, limits.sequences))
    for name, seq_lens in nested_shapes(planned, limits, num_buckets):
        plans[f"by the {name}"] = fitted_plan(limits, seq_lens, lengths)
    longest = limits.rounded(planned.max(axis=0))[None]
    # One shape that holds all examples may exceed the limits.
    if limits.batch_sizes(longest)[0] > 0:
        plans[ONE_SHAPE] = fitted_plan(limits, longest, lengths)
    return _Rules(plans, None, num_buckets, exact=False)


def _costed(plan: BucketPlan, limits: Limits) -> BucketPlan:
    """Returns a plan of the user with the costs of the limits."""
    if plan.sequences != limits.sequences:
        raise ValueError(
            f"`others` has a plan of the sequences {list(plan.sequences)}, but the "
            f"lengths have {list(limits.sequences)}. Pass plans of the same sequences."
        )
    return limits.costed(plan)


def _are_proportional(costs: np.ndarray, tokens: np.ndarray) -> bool:
    ratios = costs / tokens
    return bool(np.allclose(ratios, ratios[0], rtol=1e-9, atol=0))
