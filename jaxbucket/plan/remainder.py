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

from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_choice

Remainder: TypeAlias = Literal["cheapest", "promote", "pad", "drop"]

# What becomes of a remainder.
_PROMOTE, _PAD, _DROP = "promote", "pad", "drop"


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
    k: K buckets take K**2 steps, all those of a bucket at once.

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
    counts, batch_sizes = (np.asarray(x, np.int64) for x in (counts, batch_sizes))
    if policy == "cheapest":
        choices = _cheapest(counts, batch_sizes, np.asarray(costs))
    else:
        choices = [policy] * len(counts)
        if policy == _PROMOTE:
            choices[-1] = _PAD
    return _flow(counts, batch_sizes, choices)


def _cheapest(
    counts: np.ndarray, batch_sizes: np.ndarray, costs: np.ndarray
) -> list[str]:
    """What is chosen for each bucket.

    Rows that are carried into a bucket have been gathered by a chain of buckets that
    promote, one after the other: where it began says what was chosen.
    """
    # What any sum is below. Where 64 bits may not hold it, Python's own numbers do.
    most = (sum(counts.tolist()) + len(counts)) * max(costs.tolist())
    if costs.dtype.kind != "f":
        costs = costs.astype(np.int64 if most < 2**63 else object)
    # After each bucket, of every number of rows that may be carried: the rows, the
    # cost so far and the beginning of the chain. The first has none.
    carry, cost = np.zeros(1, np.int64), np.zeros(1, costs.dtype)
    begin = np.zeros(1, np.int64)
    begins = []
    columns = zip(counts.tolist(), batch_sizes.tolist(), costs.tolist(), strict=True)
    for bucket, (count, batch_size, batch_cost) in enumerate(columns):
        full, rest = np.divmod(count + carry, batch_size)
        padded = cost + (full + (rest > 0)).astype(costs.dtype) * batch_cost
        promoted = cost + full.astype(costs.dtype) * batch_cost
        begin[0] = bucket
        best = int(np.argmin(padded))
        begins.append(int(begin[best]))
        up = np.flatnonzero(rest)
        if np.any(carry >= batch_size):
            up = _cheapest_of_each(rest[up], promoted[up], up)
        carry = np.append(0, rest[up])
        cost = np.append(padded[best], promoted[up])
        begin = np.append(0, begin[up])
    choices = [_PROMOTE] * len(begins)
    bucket = len(begins) - 1
    while bucket >= 0:
        choices[bucket] = _PAD
        bucket = begins[bucket] - 1
    return choices


def _cheapest_of_each(
    rest: np.ndarray, cost: np.ndarray, states: np.ndarray
) -> np.ndarray:
    """Of states that carry the same rest the cheapest, in the place of their first.

    Where costs are equal, the first one of these.
    """
    order = np.argsort(cost, kind="stable")
    order = order[np.argsort(rest[order], kind="stable")]
    starts = np.flatnonzero(np.diff(rest[order], prepend=-1))
    if not len(starts):
        return states
    places = np.minimum.reduceat(order, starts)
    return states[order[starts][np.argsort(places)]]


def least_cost(
    counts: Sequence[int],
    batch_sizes: Sequence[int],
    costs: Sequence[int],
    beyond: Sequence[int],
    limit: int,
) -> tuple[int | None, int]:
    """Returns what the flow with the cheapest remainders costs, and the work of it.

    Fewer carried rows at no more cost are never worse: of the numbers of rows that a
    bucket may hand on few are left, and the cost alone is found in little time.

    Example:
      >>> least_cost([5, 1], [4, 2], [32, 32], beyond=[0, 0], limit=100)
      (64, 3)
      >>> least_cost([5, 1], [4, 2], [32, 32], beyond=[16, 0], limit=40)
      (None, 1)

    Args:
      counts: `[K]` examples of every bucket, and so the others, as Python's integers.
      batch_sizes: B.
      costs: of a batch.
      beyond: what the examples of all buckets behind each cost at least.
      limit: no cost above it is looked for.

    Returns:
      The cost, or None if it is above the limit; the states that were looked at.
    """
    # Rows that are carried, increasing, and what they cost so far, decreasing.
    states, work, cost = [(0, 0)], 0, 0
    for count, batch_size, batch_cost, rest_cost in zip(
        counts, batch_sizes, costs, beyond, strict=True
    ):
        padded, promoted = [], []
        for carry, before in states:
            full, rest = divmod(count + carry, batch_size)
            before += full * batch_cost
            if rest:
                promoted.append((rest, before))
                before += batch_cost
            padded.append(before)
        cost = min(padded)
        promoted.sort()
        work += len(states)
        states, least = [(0, cost)], cost
        for state in promoted:
            if state[1] < least:
                states.append(state)
                least = state[1]
        if least + rest_cost > limit:
            return None, work
    return (cost if cost <= limit else None), work


def epoch_cost(batches: np.ndarray, costs: np.ndarray) -> float:
    """Returns what `[K]` batches cost by `[K]` costs of one; integers have no end."""
    if costs.dtype.kind == "f":
        return (batches * costs).sum().item()
    pairs = zip(batches.tolist(), costs.tolist(), strict=True)
    return sum(number * cost for number, cost in pairs)


def filler_bucket(plan: BucketPlan) -> Bucket:
    """Returns the bucket of an empty batch that makes a step full: the cheapest."""
    costs = dict(zip(plan.buckets, plan.costs.tolist(), strict=True))
    return min(plan.buckets, key=lambda bucket: (costs[bucket], bucket.seq_len))


def _flow(counts: np.ndarray, batch_sizes: np.ndarray, choices: list[str]) -> RowFlow:
    carried, batches, rows, dropped, carry = [], [], [], [], 0
    for count, batch_size, choice in zip(
        counts.tolist(), batch_sizes.tolist(), choices, strict=True
    ):
        total = count + carry
        full, rest = divmod(total, batch_size)
        carried.append(carry)
        carry = rest if choice == _PROMOTE else 0
        dropped.append(rest if choice == _DROP else 0)
        batches.append(full + (rest > 0 and choice == _PAD))
        rows.append(total - carry - dropped[-1])
    columns = (carried, batches, rows, dropped)
    return RowFlow(counts, *(np.array(x, np.int64) for x in columns))
