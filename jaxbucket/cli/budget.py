"""The bucket of a plan that leaves the largest share of its token budget unused."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.reports.epoch import Report

# A bucket is reported if it uses less than this share of its budget, and at least this
# share of an epoch is in it.
_WELL_USED, _RELEVANT = 0.75, 0.05


@dataclasses.dataclass(frozen=True)
class UnusedBudget:
    """A bucket whose B is limited by rounding, although it has examples for more rows.

    Attributes:
      bucket: the shape.
      max_tokens: the budget of the bucket.
      rows: the next larger B that the limits allow.
      multiple: every B is a multiple of this number.
      is_common: whether all buckets have the same budget.
    """

    bucket: Bucket
    max_tokens: int
    rows: int
    multiple: int
    is_common: bool

    @property
    def used(self) -> float:
        """The share of the budget that a batch uses."""
        return self.bucket.num_tokens / self.max_tokens

    @property
    def enough_tokens(self) -> int:
        """The smallest budget that fits `rows` rows."""
        return self.rows * self.bucket.tokens_per_row

    def sentence(self, unit: str) -> str:
        """Returns a note for the user."""
        budget = f"its budget of {self.max_tokens:,} {unit}"
        if self.is_common:
            budget = f"`--max-tokens {self.max_tokens}`"
        reason = f", because B is a multiple of {self.multiple}"
        return (
            f"{self.bucket} uses {self.used:.0%} of {budget}"
            f"{reason if self.multiple > 1 else ''}. {self.enough_tokens:,} {unit} "
            f"would fit {self.rows} rows."
        )

    def to_dict(self, unit: str) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "bucket": self.bucket.to_list(),
            "max_tokens": self.max_tokens,
            "used": self.used,
            "rows": self.rows,
            "enough_tokens": self.enough_tokens,
            "note": self.sentence(unit),
        }


def unused_budget(
    plan: BucketPlan, limits: Limits, epoch: Report
) -> UnusedBudget | None:
    """Returns the bucket that uses the smallest share of its budget.

    Returns None if all buckets use most of their budget, hold a small share of the
    epoch, or have no examples for more rows.

    Args:
      plan: a plan within the limits.
      limits: the limits of its shapes.
      epoch: the report of the plan.
    """
    multiple = limits.batch_size_multiple
    budgets = limits.budgets(plan.boundaries).tolist()
    candidates = []
    for bucket, budget, part in zip(plan.buckets, budgets, epoch.buckets, strict=True):
        rows = bucket.batch_size + multiple
        is_allowed = limits.max_batch_size is None or rows <= limits.max_batch_size
        is_allowed &= rows * bucket.tokens_per_row > budget
        is_filled = part.examples + part.carried >= rows * limits.accumulate
        if is_allowed and is_filled and part.token_share >= _RELEVANT:
            is_common = isinstance(limits.max_tokens, int)
            unused = UnusedBudget(bucket, budget, rows, multiple, is_common)
            candidates.append(unused)
    worst = min(candidates, key=lambda unused: unused.used, default=None)
    return None if worst is None or worst.used >= _WELL_USED else worst
