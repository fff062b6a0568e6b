"""Compares the plans that different rules for boundaries choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.lengths import Lengths, lengths_matrix
from jaxbucket.base.sizes import check_same_sequences
from jaxbucket.plan.candidates import Candidates
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
)
from jaxbucket.plan.reports.epoch import report


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
            "`remainder='drop'` leaves out other examples in every plan. Choose a "
            "different value, or call `report` for each plan."
        )
    num_buckets = check_positive("num_buckets", num_buckets)
    limits = limits.of(lengths)
    if isinstance(lengths, Mapping):
        plans, least_cost = _sequence_rules(lengths, limits, num_buckets), None
        exact = False
    else:
        plans, least_cost, exact = _rules(check_lengths(lengths), limits, num_buckets)
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
    exact = exact and remainder == "cheapest"
    return Comparison((), least_cost, num_buckets, exact).extended(compared)


def _rules(
    lengths: np.ndarray, limits: Limits, num_buckets: int
) -> tuple[dict[str, BucketPlan], float, bool]:
    """Returns each rule's plan, a bound of their costs, and `Optimum.exact`."""
    candidates = Candidates.of(lengths, limits)
    num_buckets = min(num_buckets, len(candidates))
    optimum = Optimum(candidates, num_buckets)
    chosen = {OPTIMAL: optimum.choice()}
    by_tokens = Candidates.of(lengths, dataclasses.replace(limits, cost_fn=None))
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


def _are_proportional(costs: np.ndarray, tokens: np.ndarray) -> bool:
    ratios = costs / tokens
    return bool(np.allclose(ratios, ratios[0], rtol=1e-9, atol=0))
