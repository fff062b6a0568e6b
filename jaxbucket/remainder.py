"""What happens to the examples that do not fill a bucket's last batch.

Bucket k has `n` rows: its own examples and those carried up from bucket k - 1. Full
batches take `n // B * B` of them. The rest, the remainder, goes up into bucket k + 1,
stays as one batch with empty rows, or is left out of an epoch. The choice depends on
counts alone, so it is the same in every epoch and on every host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base import Bucket, BucketPlan
from jaxbucket.checks import check_choice

Remainder: TypeAlias = Literal["cheapest", "promote", "pad", "drop"]

# What becomes of a remainder.
_PROMOTE, _PAD, _DROP = "promote", "pad", "drop"
_CHOICES: dict[Remainder, tuple[str, ...]] = {
    "cheapest": (_PAD, _PROMOTE),
    "promote": (_PROMOTE,),
    "pad": (_PAD,),
    "drop": (_DROP,),
}


@dataclasses.dataclass(frozen=True)
class RowFlow:
    """How many rows and batches every bucket has in one epoch.

    Attributes:
      counts: `[K]` int64, examples whose shortest bucket this is.
      carried: `[K]` int64, rows that come up from the bucket below.
      batches: `[K]` int64, batches of an epoch; the last one may have empty rows.
      rows: `[K]` int64, rows of these batches that hold an example.
      dropped: `[K]` int64, examples left out of an epoch.
    """

    counts: np.ndarray
    carried: np.ndarray
    batches: np.ndarray
    rows: np.ndarray
    dropped: np.ndarray

    @property
    def num_batches(self) -> int:
        """Batches of one epoch, over all buckets."""
        return int(self.batches.sum())


def flow_remainders(
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    costs: Sequence[float] | np.ndarray,
    policy: Remainder = "cheapest",
) -> RowFlow:
    """Returns how the remainders of an epoch flow, under a policy.

    "cheapest" is exact: it compares the costs of every sequence of promote-or-pad
    decisions. Of all sequences that carry the same number of rows out of a bucket only
    the cheapest can be the best, and there are at most k + 1 such numbers after bucket
    k.

    Example: of 5 examples in B = 4 the fifth goes up and fills B = 2.
      >>> flow_remainders([5, 1], batch_sizes=[4, 2], costs=[32, 32]).batches
      array([1, 1])

    Args:
      counts: `[K]` examples of every bucket.
      batch_sizes: `[K]` B of every bucket.
      costs: `[K]` of a batch of every bucket, for example its B * T.
      policy: "cheapest"; "promote" to go up always, but from the last bucket; "pad" to
        stay always; "drop" to leave them out.
    """
    check_choice("remainder", policy, get_args(Remainder))
    # rows carried out of the last bucket seen -> (cost so far, what was chosen)
    nothing: tuple[float, tuple[str, ...]] = (0, ())
    best = {0: nothing}
    # As Python's own numbers: a sum of integers has no bound.
    columns = (np.asarray(x).tolist() for x in (counts, batch_sizes, costs))
    shapes = list(zip(*columns, strict=True))
    for bucket, (count, batch_size, batch_cost) in enumerate(shapes):
        choices = _CHOICES[policy]
        if bucket == len(shapes) - 1 and _PROMOTE in choices:
            choices = (_PAD,)
        reached: dict[int, tuple[int, tuple[str, ...]]] = {}
        for carry, (cost, chosen) in best.items():
            full, rest = divmod(count + carry, batch_size)
            # Where nothing is left over, there is nothing to choose.
            for choice in choices if rest else choices[:1]:
                carry_out = rest if choice == _PROMOTE else 0
                padded = rest > 0 and choice == _PAD
                total = cost + (full + padded) * batch_cost
                if carry_out not in reached or total < reached[carry_out][0]:
                    reached[carry_out] = (total, (*chosen, choice))
        best = reached
    return _flow(shapes, min(best.values())[1])


def filler_bucket(plan: BucketPlan) -> Bucket:
    """Returns the bucket of an empty batch that makes a step full: the cheapest."""
    costs = dict(zip(plan.buckets, plan.costs.tolist(), strict=True))
    return min(plan.buckets, key=lambda bucket: (costs[bucket], bucket.seq_len))


def _flow(shapes: list[tuple[int, int, float]], chosen: tuple[str, ...]) -> RowFlow:
    carried, batches, rows, dropped, carry = [], [], [], [], 0
    for (count, batch_size, _), choice in zip(shapes, chosen, strict=True):
        total = count + carry
        full, rest = divmod(total, batch_size)
        carried.append(carry)
        carry = rest if choice == _PROMOTE else 0
        dropped.append(rest if choice == _DROP else 0)
        batches.append(full + (rest > 0 and choice == _PAD))
        rows.append(total - carry - dropped[-1])
    counts = [count for count, _, _ in shapes]
    columns = (counts, carried, batches, rows, dropped)
    return RowFlow(*(np.array(x, np.int64) for x in columns))
